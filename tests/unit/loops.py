"""Loops in place of parameters, for tests of many cheap cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def for_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a test of a name: it runs for every name and reports all that fail."""

    def decorate(body: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for name in names:
                try:
                    body(name)
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
            assert not failures, "\n".join(failures)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate
