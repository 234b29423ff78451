"""The engines whose configurations are written and read: each is a file of this folder with an ``ADAPTER``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ..schema.base import read_text
from ..schema.engine_facts import ENGINES as FACTS
from ..schema.errors import ConfigError
from ..schema.model import ModelSpec
from ..schema.plan import Plan
from ..schema.training_plan import TrainingPlan
from .adapter import DRIVEN, Adapter, Exported, Imported, Limit
from .tables import PARSERS, parse_table

_EXPORTERS = tuple(facts.exporter for facts in FACTS.values() if facts.exporter)

ENGINES = tuple(dict.fromkeys(("torchtitan", "megatron", "nemo", "deepspeed", "accelerate", *_EXPORTERS)))
"""Those whose configurations are read and written, in the order in which a file is tried; all exporters of engine_facts.py."""

TARGETS = (*ENGINES, "kubernetes")
"""What a plan of training can be written for: engines, and what starts our own one."""

SERVING_TARGETS = ("vllm", "sglang", "trtllm", "dynamo", "llm-d")
"""What a serving plan can be written for."""

RL_TARGETS = ("verl", "nemo-rl")
"""What a post-training plan can be written for."""

_LOCAL_UPDATES = "its regions train by themselves between sums, which `meshwright apply` makes"

_OF_TASK = {"workload": TARGETS, "serving": SERVING_TARGETS, "post_training": RL_TARGETS}
"""By the field of a plan that holds its task."""


def targets_of(plan: Plan) -> tuple[str, ...]:
    """Return what a plan of its kind can be written for."""
    return _OF_TASK.get(plan.task_field, ())


def export(plan: Plan, engine: str, **options: str) -> Exported:
    """Return the plan in an engine's own form.

    Args:
        options: of what is written: ``rdma_resource`` of Kubernetes.

    Raises:
        ConfigError: there is no such engine or option, or it cannot run the plan as it is: each reason with its numbers.
    """
    chosen, original = _known(engine, plan), plan
    if isinstance(plan, TrainingPlan) and plan.local_updates is not None:
        raise ConfigError(f"{engine} cannot run this plan", details=(_LOCAL_UPDATES,), help="plan with --sync step")
    if unknown := options.keys() - set(chosen.options):
        raise ConfigError(f"{engine} takes no {', '.join(sorted(unknown))}", help="it is for kubernetes")
    plan = chosen.adapt(original)
    if broken := _broken(chosen, plan):
        raise ConfigError(
            f"{engine} {chosen.version} cannot run this plan",
            details=tuple(f"{limit.reason(plan)}   [{limit.name}]" for limit in broken),
            help=broken[0].help,
        )
    made = chosen.write(plan, **options)
    if not isinstance(plan, TrainingPlan) or not isinstance(original, TrainingPlan):
        return made
    before, after = original.layout.model_dump(), plan.layout.model_dump()
    adapted = (
        f"{name}={before[name]}: {engine} runs {value}" for name, value in after.items() if before[name] != value
    )
    return made.replace(not_expressed=(*adapted, *made.not_expressed))


def as_run_by(plan: TrainingPlan, target: str) -> TrainingPlan | None:
    """Return the plan as another engine runs what `export` writes for it, with that engine's name; None: it is made for that one.

    Its estimate is still the old one: `planner.planned_stages.reestimate` costs it.

    Raises:
        ConfigError: there is no such target.
    """
    if target not in FACTS or plan.workload.engine == target:
        _known(target, plan)
        return None
    plan = _known(target, plan).adapt(plan)
    return plan.replace(workload=plan.workload.replace(engine=target))


def exportable(plan: Plan) -> dict[str, str | None]:
    """Return for each of `targets_of` the plan why it cannot run it as it is; None: `export` writes it."""
    if isinstance(plan, TrainingPlan) and plan.local_updates is not None:
        return dict.fromkeys(targets_of(plan), _LOCAL_UPDATES)
    adapters = {target: _adapter(target) for target in targets_of(plan)}
    broken = {target: _broken(chosen, chosen.adapt(plan)) for target, chosen in adapters.items()}
    return {target: limits[0].reason(plan) if limits else None for target, limits in broken.items()}


def read_configuration(
    path: str | Path, *, engine: str | None = None, num_devices: int | None = None, model: ModelSpec | None = None
) -> Imported:
    """Return the layout of a configuration file; nothing of the file is run.

    Args:
        engine: whose it is; None finds out from its form and content.
        num_devices: ranks of the job, where the file does not say.
        model: needed where the file counts layers.

    Raises:
        ConfigError: it cannot be read, is of no engine known here, or its numbers do not fit together.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}", help=f"one of {', '.join(ENGINES)}")
    text, suffix = read_text(path), Path(path).suffix
    candidates = [_adapter(name) for name in ENGINES if engine in (None, name)]
    try:
        for reader in candidates:
            if reader.read_text and (suffix in reader.suffixes or not (reader.suffixes or suffix in PARSERS)):
                return reader.read_text(text, num_devices, model)
        if suffix not in PARSERS:
            raise ConfigError(f"not a configuration file of {engine}", help="its name ends in .toml, .json or .yaml")
        content = parse_table(suffix, text)
        for reader in candidates:
            if reader.read_table and (engine or (reader.is_own_table and reader.is_own_table(content))):
                return reader.read_table(content, num_devices, model)
        raise ConfigError("no engine is recognised by its content", help=f"give --from: one of {', '.join(ENGINES)}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", details=error.details, help=error.help) from None


def _known(target: str, plan: Plan) -> Adapter:
    known, others = targets_of(plan), {*TARGETS, *SERVING_TARGETS, *RL_TARGETS}
    if target not in known:
        why = f"{target} takes no plan for {plan.task_name}" if target in others else f"unknown engine {target!r}"
        raise ConfigError(why, help=f"one of {', '.join(known)}" if known else None)
    return _adapter(target)


def _broken(adapter: Adapter, plan: Plan) -> list[Limit]:
    return [limit for limit in (DRIVEN, *adapter.limits) if not limit.holds(plan)]


def _adapter(engine: str) -> Adapter:
    folder = ".serving" if engine in SERVING_TARGETS else ".rl" if engine in RL_TARGETS else ""
    adapter: Adapter = import_module(f"{folder}.{engine.replace('-', '_')}", __package__).ADAPTER
    return adapter
