"""How far numbers may differ that are meant to be equal: one list for all solvers, each with its reason."""

from __future__ import annotations

ROUNDING = 1e-12
"""Relative. Sums of the same numbers in another order differ by a few units in the last place (2e-16 each)."""

SUMMED = 1e-9
"""Relative. Longer ways to the same number: memory against a cap, an objective against its bound, a rate and its inverse."""

CLOCK = 1e-9
"""Absolute, in ticks or bytes of a schedule, of which the smallest that matter are 1: an event is not missed for its last digit."""

FLOW = 1e-10
"""Relative. Levels of GPUs after thousands of transfers of load along paths, each of which rounds."""

SOLVER = 1e-6
"""Relative. HiGHS accepts rows that are violated by up to this (its default primal tolerance)."""

RELAXATION = 1e-5
"""Relative. Bounds of linear programs of which some rows are scaled by 1e9 bytes: ten times `SOLVER`."""

EVENNESS = 1e-7
"""Weight of squares next to seconds: breaks ties between splits, and is small against any difference that is not rounding."""
