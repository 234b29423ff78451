"""What engines cannot do and what their configurations cannot hold, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schema.engine_facts import ENGINES
from ..schema.errors import ConfigError
from ..schema.runnable import broken_rules, problem_facts
from ..schema.training_plan import TrainingPlan


@dataclass(frozen=True)
class Limit:
    """Something that an engine cannot do and that would change what fits or what is computed."""

    name: str
    holds: Callable[[TrainingPlan], bool]
    reason: Callable[[TrainingPlan], str]
    help: str


def require_expressible(plan: TrainingPlan, engine: str, version: str, limits: tuple[Limit, ...]) -> None:
    """Raise unless the engine can run the plan as it is.

    Raises:
        ConfigError: every broken limit with its name.
    """
    broken = [limit for limit in limits if not limit.holds(plan)]
    if broken:
        raise ConfigError(
            f"{engine} {version} cannot run this plan",
            details=tuple(f"{limit.reason(plan)}   [{limit.name}]" for limit in broken),
            help=broken[0].help,
        )


def rules_of(engine: str) -> Limit:
    """Return what the search knows of a planned engine: a plan that was made for it keeps all of it."""

    def broken(plan: TrainingPlan) -> tuple[str, ...]:
        layout, world_size = plan.layout, plan.cluster.num_devices
        problem = problem_facts(plan.model, plan.workload, world_size=world_size, scaleup_domain=layout.tp)
        return broken_rules(layout, problem, ENGINES[engine].rules or ())

    return Limit(
        f"{engine}_rules",
        lambda p: not broken(p),
        lambda p: "; ".join(broken(p)),
        f"plan again with --engine {engine}",
    )


def precisions_of(engine: str, precisions: tuple[str, ...], reason: str) -> Limit:
    """Return the limit of an engine that trains in these precisions only."""
    return Limit(
        f"{engine}_precision",
        lambda p: p.workload.precision in precisions,
        lambda p: f"precision {p.workload.precision}: {reason}",
        "plan again with --precision bf16-mixed",
    )


def offload_of(engine: str, kinds: tuple[str, ...], reason: str) -> Limit:
    """Return the limit of an engine that moves these kinds of states only, and no activations."""
    return Limit(
        f"{engine}_offload",
        lambda p: p.layout.offload in kinds and not p.layout.offload_activations,
        lambda p: f"offload={p.layout.offload}, offload_activations={p.layout.offload_activations:g}: {reason}",
        "--fix offload=none",
    )


def _several_choices(plan: TrainingPlan) -> str:
    layout = plan.layout
    part = f" of {layout.recompute_fraction:g} of the blocks" if layout.recompute_fraction < 1 else ""
    return f"recompute={layout.recompute}{part}: the engine has one choice for all blocks"


ONE_RECOMPUTE = Limit(
    "recompute_of_all_blocks",
    lambda p: p.layout.recompute != "mixed" and p.layout.recompute_fraction == 1,
    _several_choices,
    "plan again with --fix recompute=full",
)
NO_EXPERT_AXES = Limit(
    "no_expert_axes",
    lambda p: p.layout.ep == 1 and p.layout.etp == 1,
    lambda p: f"ep {p.layout.ep}, etp {p.layout.etp}: the configuration has no expert parallelism",
    "--fix ep=1,etp=1",
)
NO_PIPELINE = Limit(
    "no_pipeline",
    lambda p: p.layout.pp == 1,
    lambda p: f"pp {p.layout.pp}: the configuration has no pipeline",
    "--fix pp=1",
)
NO_ULYSSES = Limit(
    "no_ulysses",
    lambda p: p.layout.cp_ulysses == 1,
    lambda p: f"cp_ulysses {p.layout.cp_ulysses}: context parallelism of the engine is a ring",
    "--fix cp_ulysses=1",
)
NO_LEVELS = Limit(
    "no_levels",
    lambda p: p.layout.gradient_shard == 1 and p.layout.optimizer_shard == 1,
    lambda p: (
        f"gradient_shard {p.layout.gradient_shard}, optimizer_shard {p.layout.optimizer_shard}: every state is sharded alike"
    ),
    "--fix gradient_shard=1,optimizer_shard=1",
)
VOCABULARY_AT_ENDS = Limit(
    "vocabulary_at_ends",
    lambda p: p.layout.vocabulary == "ends",
    lambda p: "vocabulary=split: the engine keeps embedding and head on the first and the last stage",
    "--fix vocabulary=ends",
)
FULL_TRAINING = Limit(
    "full_training",
    lambda p: p.workload.adapters is None and p.workload.has_backward,
    lambda p: (
        "the plan trains adapters: the engine's configuration of them is not written"
        if p.workload.has_backward
        else "the plan trains without a backward pass, which engines do not"
    ),
    "plan again with --train full",
)
"""Adapters are set in the training script of each engine."""


def devices_per_node(plan: TrainingPlan) -> int:
    """Return the devices of the cluster's nodes, where all are equal; of the largest ones otherwise."""
    return max(group.devices_per_node for group in plan.cluster.groups)


def torchrun(plan: TrainingPlan) -> str:
    """Return the beginning of the line that starts the ranks of one node."""
    nodes = plan.cluster.num_nodes
    where = ' --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of the first node}"' if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices_per_node(plan)}{where}"


def placement_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say where ranks and experts lie, unless it is where every engine puts them."""
    lines = []
    if plan.rank_map != tuple(range(len(plan.rank_map))):
        devices = ", ".join(map(str, plan.rank_map[:8])) + (", ..." if len(plan.rank_map) > 8 else "")
        lines.append(
            f"rank_map: the plan runs its ranks on the devices {devices}; start the nodes in the order that puts them there"
        )
    if plan.expert_slots:
        lines.append("expert_slots: experts stand once and in order; `meshwright experts` says where they should be")
    return tuple(lines)


def reduction_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say that FSDP2 has no stage 1 of its own outside a pipeline."""
    if plan.layout.zero_stage != 1 or plan.layout.pp > 1 or plan.num_microbatches == 1:
        return ()
    return ("zero_stage=1: gradients are reduced and sharded in every micro-batch, as under stage 2",)
