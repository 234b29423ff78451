"""The offload schedule says what lies where, and refuses what cannot be meant."""

from __future__ import annotations

import pytest
from meshwright.planner import plan
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    Layout,
    ModelSpec,
    OffloadSchedule,
    Stage,
    TrainingPlan,
    Workload,
)


@pytest.fixture(scope="module")
def planned() -> TrainingPlan:
    """One layer after the embedding and so on, on one device."""
    return plan(
        ModelSpec.named("llama-3.2-1b"),
        ClusterSpec.parse("1xH100-SXM-80GB"),
        Workload(seq_len=1024, global_batch_size=1),
        fixed={"recompute": "none"},
    )


def _scheduled(
    planned: TrainingPlan, schedule: OffloadSchedule, offloads: dict[int, str] | None = None
) -> TrainingPlan:
    layers = planned.stages[0].num_layers
    stage = planned.stages[0].replace(layer_offload=tuple((offloads or {}).get(idx, "none") for idx in range(layers)))
    return planned.replace(layout=planned.layout.replace(offload="scheduled"), stages=(stage,), offload=schedule)


def test_a_scheduled_plan_comes_back_from_json(planned: TrainingPlan) -> None:
    schedule = OffloadSchedule(host_optimizer_layers=(0, 2), streamed_optimizer_layers=(1,), prefetch_layers=2)
    whole = _scheduled(planned, schedule, {3: "activations"})
    again = TrainingPlan.model_validate_json(whole.model_dump_json())
    assert again == whole
    assert again.stages[0].offload_of(3) == "activations" and again.stages[0].offload_of(4) == "none"
    assert again.offload is not None and again.offload.off_device_layers == {0, 1, 2}


def test_a_plan_without_the_new_fields_loads(planned: TrainingPlan) -> None:
    data = planned.model_dump()
    del data["offload"]
    del data["stages"][0]["layer_offload"]
    assert TrainingPlan(**data) == planned


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"host_optimizer_layers": (2, 1)}, "once and in order"),
        ({"host_optimizer_layers": (1,), "streamed_parameter_layers": (1,)}, "layer 1 is in"),
        ({"storage_optimizer_layers": (1,), "storage_path": "x"}, "states are on the device"),
        ({"host_optimizer_layers": (1,), "storage_optimizer_layers": (1,)}, "need a storage_path"),
        ({"host_bytes": 2, "host_budget_bytes": 1}, "more than host_budget_bytes"),
    ],
)
def test_a_contradictory_schedule_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OffloadSchedule(**fields)


def test_offloaded_activations_need_their_recompute() -> None:
    with pytest.raises(ConfigError, match="needs recompute none"):
        Stage(first_layer_idx=0, num_layers=1, recompute="selective", layer_offload=("activations",))
    with pytest.raises(ConfigError, match="needs recompute full"):
        Stage(first_layer_idx=0, num_layers=1, layer_offload=("boundary",))
    with pytest.raises(ConfigError, match="2 entries for 1 layers"):
        Stage(first_layer_idx=0, num_layers=1, layer_offload=("none", "none"))


def test_switches_that_an_older_plan_has_in_its_workload_are_the_layouts(planned: TrainingPlan) -> None:
    document = planned.model_dump()
    for name, value in {"gradients": "compute", "tp_overlap": False, "cuda_graphs": True}.items():
        del document["layout"][name]
        document["workload"][name] = value
    layout = TrainingPlan(**document).layout
    assert layout == planned.layout.replace(gradients="compute", cuda_graphs=True)


def test_a_plan_and_its_schedule_go_together(planned: TrainingPlan) -> None:
    with pytest.raises(ConfigError, match="go together"):
        planned.replace(offload=OffloadSchedule())
    with pytest.raises(ConfigError, match="layer 0, which is no block"):
        _scheduled(planned, OffloadSchedule(), {0: "activations"})
    with pytest.raises(ConfigError, match="names layer 99"):
        _scheduled(planned, OffloadSchedule(host_optimizer_layers=(99,)))
    with pytest.raises(ConfigError, match="has them by layer"):
        Layout(offload="scheduled", offload_activations=0.5)
