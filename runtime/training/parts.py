"""The parts of a step, by name."""

from __future__ import annotations

from typing import Literal

Part = Literal["forward", "backward", "communication", "pipeline_wait", "optimizer", "other", "data", "preempted"]
PARTS: tuple[Part, ...] = (
    "forward", "backward", "communication", "pipeline_wait", "optimizer", "other", "data", "preempted",
)  # fmt: skip
"""``optimizer`` is the update alone, ``other`` the rest of the step. The last two do not add to its time: ``data`` comes before it;
``preempted`` is how long, of the parts that compute on a CPU, the process had no core, because other work had it.
"""
BESIDE: tuple[Part, ...] = ("data", "preempted")
