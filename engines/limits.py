"""What several engines cannot do, each with its reason."""

from __future__ import annotations

from ..schema.layout_facts import Rule, layout_facts
from ..schema.plan import Plan
from ..schema.rules import broken_rules
from .documents import Limit


def of_engine(engine: str, rules: tuple[Rule, ...]) -> Limit:
    """What the search knows of an engine: a plan that was made for it keeps all of it."""

    def broken(plan: Plan) -> tuple[str, ...]:
        layout, world_size = plan.layout, plan.cluster.num_devices
        facts = layout_facts(plan.model, plan.workload, layout, world_size=world_size, scaleup_domain=layout.tp)
        return broken_rules(facts, rules)

    return Limit(
        f"{engine}_rules",
        lambda p: not broken(p),
        lambda p: "; ".join(broken(p)),
        f"plan again with --engine {engine}",
    )


RUNNABLE_HELP = "plan again with --engine megatron (or deepspeed), or --fix what the engine has"


def one_recompute(help_: str) -> Limit:
    """The same recompute in every block."""
    return Limit(
        "recompute_of_all_blocks",
        lambda p: p.layout.recompute != "mixed" and p.layout.recompute_fraction == 1,
        _several_choices,
        help_,
    )


def _several_choices(plan: Plan) -> str:
    layout = plan.layout
    of_some = f" of {layout.recompute_fraction:g} of the blocks" if layout.recompute_fraction < 1 else ""
    return f"recompute={layout.recompute}{of_some}: the engine has one choice for all blocks"


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
NO_OFFLOAD = Limit(
    "no_offload",
    lambda p: p.layout.offload == "none" and p.layout.offload_activations == 0,
    lambda p: (
        f"offload={p.layout.offload}, offload_activations={p.layout.offload_activations:g}: not in the configuration"
    ),
    "--fix offload=none",
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
