"""What the solvers order: the passes of a pipeline and their replay (cost_models/pipeline_simulation.py)."""

from ..cost_models.pipeline_simulation import Action, Kind, Order, Pipeline, Timeline, peak_bytes, placement, simulate

__all__ = ["Action", "Kind", "Order", "Pipeline", "Timeline", "peak_bytes", "placement", "simulate"]
