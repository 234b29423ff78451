"""What a layout must satisfy to be executed correctly: named predicates, each with its reason.

The search and the runtime use the same list, so that whatever `plan` can choose, `apply` can run. A predicate is written once
for numbers and for arrays of them: the search evaluates it over its whole space in one pass.
"""

from __future__ import annotations

from .common_rules import ENGINE_RULES, EXCHANGE_RULES, TOKENS_OF_EXPERTS
from .engine_rules import (
    DEEPSPEED_EXCHANGE,
    MEGATRON_EXCHANGE,
    MEGATRON_SEQUENCE,
    RULES,
    RULES_OF_ENGINE,
    VERSION_RULES,
)
from .errors import ConfigError
from .layout import Layout
from .layout_facts import Facts, Rule, layout_facts
from .model import ModelSpec
from .workload import Engine, Workload


def exchange_rules(engine: Engine) -> tuple[Rule, ...]:
    """Of the rules of an engine those that look at tp, cp and cp_ulysses alone."""
    of_engine = {"megatron": (MEGATRON_EXCHANGE,), "deepspeed": (DEEPSPEED_EXCHANGE,)}
    return EXCHANGE_RULES + of_engine.get(engine, ())


def sequence_rules(engine: Engine) -> tuple[Rule, ...]:
    """Of the rules of an engine those that want sequence parallelism beside some degrees."""
    return (TOKENS_OF_EXPERTS, MEGATRON_SEQUENCE) if engine == "megatron" else (TOKENS_OF_EXPERTS,)


def rules_of(engine: Engine, *, runnable: bool = False) -> tuple[Rule, ...]:
    """What a layout must satisfy for an engine; of one that is not in RULES_OF_ENGINE only what any engine needs is known.

    Args:
        runnable: for our own runtime as it is in this version.
    """
    return ENGINE_RULES + RULES_OF_ENGINE.get(engine, ()) + (VERSION_RULES if runnable else ())


def require_our_engine(workload: Workload) -> None:
    """Raise unless a plan is for our own runtime.

    Raises:
        ConfigError: it is for another engine.
    """
    if workload.engine != "fsdp2":
        raise ConfigError(
            f"the plan is for {workload.engine}: `meshwright apply` runs plans for its own runtime (fsdp2) only",
            help=f"start {workload.engine} with the plan's layout, or plan again without --engine",
        )


def broken_rules(facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[str, ...]:
    """``reason [name]`` of every rule the facts (numbers) break; empty when the layout can be executed."""
    return tuple(f"{rule.reason(facts)}   [{rule.name}]" for rule in rules if not rule.holds(facts))


def require_valid(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    *,
    world_size: int,
    scaleup_domain: int,
    rules: tuple[Rule, ...] = RULES,
) -> None:
    """Raise unless every one of ``rules`` holds.

    Raises:
        ConfigError: names each broken rule with its numbers.
    """
    facts = layout_facts(model, workload, layout, world_size=world_size, scaleup_domain=scaleup_domain)
    broken = broken_rules(facts, rules)
    if broken:
        raise ConfigError(f"layout {layout} cannot run {model.name} on {world_size} devices", details=broken)
