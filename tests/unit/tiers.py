"""Tests of drawn examples in tiers: few in the short one, as many as the test is meant to have in the long one or at night."""

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


def seed_groups(num_instances: int, num_groups: int, *, num_long: int) -> pytest.MarkDecorator:
    """Give a test its ``seeds``: a quarter of the first group in the short tier, some groups in the long one, others at night."""
    marks = [pytest.mark.long] * num_long + [pytest.mark.nightly] * (num_groups - num_long)
    groups = [range(group, num_instances, num_groups) for group in range(num_groups)]
    parameters = [groups[0][::4], *(pytest.param(seeds, marks=mark) for seeds, mark in zip(groups, marks, strict=True))]
    return pytest.mark.parametrize("seeds", parameters, ids=lambda seeds: f"{seeds.start}-{seeds.step}")
