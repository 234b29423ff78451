"""A training job as a launch file describes it: model, batch, layout, switches, and where each is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schema.base import Count, Frozen
from ...schema.catalogue import model_names
from ...schema.engine_facts import OWN_ENGINE
from ...schema.errors import ConfigError
from ...schema.layout import Layout
from ...schema.model import ModelSpec
from ...schema.task import Workload
from ..adapter import Imported
from .settings import Fact

_OTHER_MODELS = {"torchtitan": OWN_ENGINE, "megatron": "nemo"}
"""Engine whose configurations hold only some models -> the one that costs its jobs of others, with the same kernels."""


class Job(Frozen):
    """A job, and what is known of how it was read.

    Attributes:
        engine: whose configuration it is.
        source: the file that was read.
        facts: what the files say, in the order in which it was read.
        assumed: what they leave open, and what was taken for it.
        unmodelled: settings that change the cost and that the model does not have, and what it does instead.
        ignored: settings that say nothing about cost: data, learning rate, checkpoints, logs.
        unknown: settings that were not read and are not known here: they may change the cost.
        undecided: conditions and files of a script that could not be followed.
    """

    engine: str
    source: str
    model: ModelSpec
    num_devices: Count
    workload: Workload
    layout: Layout
    facts: tuple[Fact, ...] = ()
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


_HARMLESS = re.compile(
    r"""(lr|learning.rate|warmup|decay|min.lr|decoupled|weight.decay|adam|init.method|clip.grad|gradient.clipping|max.grad|seed
    |data|train.(iters|samples|data)|num.(workers|train|epochs)|valid|eval|split|mock|tokenizer|tiktoken|vocab.(file|size)|merge
    |log|tensorboard|wandb|report|run.name|steps|max.steps|timing|profil|save|load|no.(save|load|create|mmap|masked)|ckpt|checkpoint$
    |exit|distributed.(timeout|backend)|master|node.rank|rdzv|tee|max.restarts|local.ranks|role|machine.rank|main.process|manual.gc
    |empty.unused|use.mcore|rotary.(base|percent)|apply.layernorm|position|no.position|calculate.per|metrics|output|hostfile|job|comm
    |experiment|wall.clock|print|kill|abort|pp.partition|moe.(aux|router|z.loss|token)|scheduler|hf.|assets|compute.environment|debug
    |same.network|report.to|do.eval|inference|print.loss|enable.tensorboard|weight|beta|lora.module|tpu|use.cpu|downcast|main.training|wait|jobid|cpu|partition|label|container|loss|tf32|do.train|overwrite|project
    |remove.unused|push|hub|packing|chat|reward|env|name|resume|config|recipe|bf16|fp16|enable.cpu.affinity|rank)""",
    re.IGNORECASE | re.VERBOSE,
)
"""Beginnings of settings, without their sections, that change neither the cost of a step nor what fits."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the user says besides the file.

    Attributes:
        num_devices: of the cluster that is asked about; a file that says another number is told so.
        sets: variables of a script and settings of the engine, which win over the file's.
    """

    num_devices: int
    model: ModelSpec | None = None
    global_batch_size: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    sets: Mapping[str, str] = field(default_factory=dict)


def costed_with(workload: Workload, model: ModelSpec) -> Workload:
    """Return the workload of a job, with the engine record that it is costed and planned with."""
    lacks = workload.engine_facts.lacks
    if lacks is None or not lacks(model, workload):
        return workload
    return workload.replace(engine=_OTHER_MODELS.get(workload.engine, workload.engine))


def complete(
    imported: Imported,
    given: Given,
    *,
    source: str,
    model: ModelSpec | None,
    switches: Mapping[str, Any],
    engine: str = "",
    **said: Any,
) -> Job:
    """Return a job from what was read and what was given.

    Args:
        switches: fields of Workload or Layout besides those that an `Imported` has.
        said: ``facts``, ``assumed``, ``unmodelled``, ``undecided``, and ``unread``: settings that no reader asked for.

    Raises:
        ConfigError: model, batch or sequence length are neither in the file nor given.
    """
    model = given.model or model
    if model is None:
        raise ConfigError("the file does not say which model is trained", help="add --model, e.g. --model llama-3.1-8b")
    batch, seq_len = given.global_batch_size or imported.global_batch_size, given.seq_len or imported.seq_len
    assumed = list(said.pop("assumed", ()))
    if seq_len is None:
        raise ConfigError("the file does not say the length of sequences", help="add --seq-len, e.g. --seq-len 8192")
    if batch is None:
        batch = imported.layout.dp * imported.layout.micro_batch_size
        assumed.append(f"global_batch_size {batch}: one micro-batch on every data-parallel rank")
    unread = tuple(dict.fromkeys(said.pop("unread", ())))
    harmless = tuple(name for name in unread if _is_harmless(name))
    on_layout = {name: value for name, value in switches.items() if name in Layout.model_fields}
    of_work = {name: value for name, value in switches.items() if name not in on_layout}
    precision: Any = given.precision or imported.precision or "bf16-mixed"
    workload = Workload(
        seq_len=seq_len,
        global_batch_size=batch,
        precision=precision,
        engine=engine or imported.engine,
        **of_work,
    )
    layout = imported.layout.replace(**on_layout) if on_layout else imported.layout
    facts = {(fact.setting, fact.place): fact for fact in reversed(said.pop("facts", ()))}
    return Job(
        facts=tuple(reversed(facts.values())),
        engine=imported.engine,
        source=source,
        model=model,
        num_devices=imported.num_devices,
        workload=costed_with(workload, model),
        layout=layout,
        assumed=(*assumed, *imported.assumed),
        ignored=harmless,
        unknown=tuple(name for name in unread if name not in harmless),
        **said,
    )


def _is_harmless(setting: str) -> bool:
    """Return whether a setting, or the section that it is in, says nothing about cost."""
    section, _, name = setting.removeprefix("--set ").lstrip("-").rpartition(".")
    return any(_HARMLESS.match(part) for part in (name, section) if part)


def model_called(name: str) -> ModelSpec | None:
    """Return the catalogue's model that a name or a path of Hugging Face's hub means; None where there is none."""
    letters = _letters(name.rstrip("/").split("/")[-1])
    for ours in sorted(model_names(), key=len, reverse=True):
        if letters == _letters(ours):
            return ModelSpec.named(ours)
    return None


def _letters(name: str) -> str:
    """Return a model's name without what does not change its shape."""
    name = name.lower()
    for word in ("meta-", "-instruct", "-chat", "-hf", "-base", "-it", "-v0.1", "-v0.2", "-v0.3", "_pretrain_config"):
        name = name.replace(word, "")
    return "".join(char for char in name if char.isalnum())


Read = Callable[..., Job]
