"""What tests of the cost model evaluate for one layer."""

from __future__ import annotations

from meshwright.cost_models.coefficients import Scenario
from meshwright.cost_models.layer.layer import LayerCost, with_data_parallel, within_layer_cost
from meshwright.cost_models.layer.operators import CostInputs, Layer, Operator, layer_operators, operator_rules
from meshwright.schema import ClusterSpec, Workload
from meshwright.schema.layout_table import LayoutTable

H100 = ClusterSpec.parse("8xH100-SXM-80GB")


def cost_inputs(hidden_dim: int, layouts: LayoutTable, workload: Workload, cluster: ClusterSpec) -> CostInputs:
    return CostInputs(hidden_dim=hidden_dim, layouts=layouts, scenario=Scenario.build(workload, cluster))


def layer_cost(
    layer: Layer, hidden_dim: int, layouts: LayoutTable, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    inputs = cost_inputs(hidden_dim, layouts, workload, cluster)
    return with_data_parallel(within_layer_cost(layer, inputs), layer, inputs)


def operators_under(
    layer: Layer, hidden_dim: int, seq_len: int, cluster: ClusterSpec = H100, **workload: object
) -> tuple[Operator, ...]:
    """Operators of a layer under a workload of this sequence length."""
    scenario = Scenario.build(Workload(seq_len=seq_len, global_batch_size=8, **workload), cluster)
    return layer_operators(layer, operator_rules(hidden_dim, scenario))
