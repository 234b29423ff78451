"""The named orders that the solvers start from (cost_models/pipeline_orders.py)."""

from ..cost_models.pipeline_orders import (
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

__all__ = [
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
