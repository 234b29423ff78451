"""Tests of drawn examples in two tiers: few of them in the short one, as many as the test is meant to have in the long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings


def drawn(*strategies: Any, few: int, many: int, under: settings | None = None, **named: Any) -> Callable[..., Any]:
    """As ``given`` with these strategies, for a test without fixtures."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("num_examples", [few, pytest.param(many, marks=pytest.mark.long)])
        def test(num_examples: int) -> None:
            settings(under or settings(deadline=None), max_examples=num_examples)(given(*strategies, **named)(check))()

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
