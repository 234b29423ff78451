from __future__ import annotations

from typing import Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "synthesised"]


SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


V_SCHEDULES: tuple[ScheduleName, ...] = ("zb-v", "v-half", "v-min")
"""Each rank holds one stage of the way down the model and one of the way back up."""


SPLIT_SCHEDULES: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", *V_SCHEDULES, "synthesised")
"""Gradients of weights are passes of their own, which may come later than those of the inputs."""
