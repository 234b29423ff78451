"""Layout: the degrees and the global choices of one way to spread a training run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from .base import Count, Frozen, shown
from .errors import ConfigError
from .schedules import SCHEDULE_NAMES, ScheduleName

Recompute = Literal["none", "selective", "full"]
LayoutRecompute = Literal["none", "selective", "full", "mixed"]
Offload = Literal["none", "optimizer", "parameters", "scheduled"]
Vocabulary = Literal["ends", "split"]


def _default_zero_stage(data: dict[str, Any]) -> Literal[0, 1, 3]:
    if data.get("dp_shard", 1) * data.get("cp", 1) == 1:
        return 0
    return 1 if data.get("pp", 1) > 1 else 3


class Layout(Frozen):
    """Degrees (all >= 1) and choices; ``world_size = dp_replicate * dp_shard * cp * tp * pp``.

    Attributes:
        dp_replicate: copies of the model, sharded or not, each training on sequences of its own.
        dp_shard: ranks of a copy that share its states as zero_stage says, each training on sequences of its own.
        tp: ranks that share every layer: heads, and the width of feed-forward parts.
        pp: ranks of a pipeline; each holds a stage, or num_model_chunks of them.
        micro_batch_size: sequences of one forward and backward pass on a data-parallel rank.
        cp: ranks that share each sequence; parameters are sharded over them too (over dp_shard * cp ranks).
        cp_ulysses: of the cp ranks, neighbours that exchange tokens for heads before attention and back after it (Ulysses);
            the cp / cp_ulysses groups of them pass keys and values round a ring.
        ep, etp: ranks that share the experts of a layer, and that share one expert; both fold onto the other ranks of a stage.
            With ep = etp = 1 experts have no axes of their own: they are split over tp like every feed-forward part.
        num_model_chunks: stages that each rank holds; chunk k of rank r is stage k pp + r, or counted back in every second
            chunk under the V schedules (zb-v, v-half, v-min: two chunks).
        schedule: order of the passes (cost_models/pipeline/orders.py); 1f1b and zb-h1 with chunks are their interleaved forms;
            synthesised is the order that the plan brings along.
        zero_stage: what dp_shard shards: 0 nothing (dp_shard = 1), 1 optimizer states, 2 and gradients, 3 and parameters.
            Unset, it is the deepest stage that can be executed: 3, or 1 under a pipeline.
        gradient_shard, optimizer_shard: data-parallel ranks (context ranks come on top, as for dp_shard) over which gradients and
            optimizer states are sharded where those are more than dp_shard has: each a multiple of the narrower one, and beside
            whole parameters (zero_stage 2) the optimizer states alone. 1: as the narrower one.
        vocabulary: where embedding and head are: on the first and the last stage, or each split over all stages.
        sequence_parallel: activations between tensor-parallel regions are split over tp along the sequence. Unset: tp > 1.
        recompute: activations recomputed in the backward pass: none; selective keeps the outputs of matrix products and
            of attention; full keeps the input of each block; mixed: each block as the stages of the plan say.
        recompute_fraction: part of each stage's blocks that recompute; the others keep everything.
        offload: what lies in the memory of the host instead of the device's: the optimizer states with the fp32 parameters, which
            the host updates; and the parameters too, which come back for every pass; scheduled: as the plan's offload schedule
            says, layer by layer (schema/offload.py).
        offload_fraction: part of the optimizer states that is offloaded; offloaded parameters are so as a whole.
        offload_activations: part of the kept activations that waits for the backward pass in the host's memory.
        offload_to: host memory or, beyond it, the node's storage.
    """

    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    cp: Count = 1
    cp_ulysses: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count = 1
    num_model_chunks: Count = 1
    micro_batch_size: Count = 1
    schedule: ScheduleName = "1f1b"
    zero_stage: Literal[0, 1, 2, 3] = Field(default_factory=_default_zero_stage)
    gradient_shard: Count = 1
    optimizer_shard: Count = 1
    vocabulary: Vocabulary = "ends"
    sequence_parallel: bool = Field(default_factory=lambda data: data.get("tp", 1) > 1)
    recompute: LayoutRecompute = "none"
    recompute_fraction: float = Field(default=1.0, gt=0, le=1)
    offload: Offload = "none"
    offload_fraction: float = Field(default=1.0, gt=0, le=1)
    offload_activations: float = Field(default=0.0, ge=0, le=1)
    offload_to: Literal["host", "storage"] = "host"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # A stage may shard over cp alone; without a stage cp only replicates.
        if (self.dp_shard > 1 and self.zero_stage == 0) or (self.dp_shard * self.cp == 1 and self.zero_stage > 0):
            raise ValueError(
                f"zero_stage {self.zero_stage} with dp_shard {self.dp_shard}: a stage above 0 needs dp_shard > 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")
        if self.offload == "parameters" and (self.offload_fraction < 1 or self.zero_stage not in (0, 3)):
            raise ValueError("offload of parameters needs offload_fraction 1 and zero_stage 3 (or one rank)")
        if self.offload == "scheduled" and (self.offload_activations > 0 or self.offload_fraction < 1):
            raise ValueError(
                "offload=scheduled needs no offload_fraction nor offload_activations: its schedule has them by layer"
            )
        return self

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert: etp, or tp where experts have no axes of their own."""
        return self.tp if self.ep == self.etp == 1 else self.etp

    @property
    def experts_follow_tp(self) -> bool:
        """Whether experts have no axes of their own."""
        return self.ep == 1 and self.etp in (1, self.tp)

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold the same part of the same experts, where these have axes of their own."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def expert_shards(self) -> int:
        """Those copies over which the states of experts are sharded: as many as lie in one group of sharded ranks."""
        if self.zero_stage == 0:
            return 1
        return math.gcd(max(self.dp_shard * self.cp * self.tp // (self.ep * self.etp), 1), self.expert_copies)

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of one step on each data-parallel rank.

        Raises:
            ConfigError: the batch does not divide.
        """
        share = self.dp * self.micro_batch_size
        if global_batch_size % share:
            raise ConfigError(
                f"global_batch_size {global_batch_size} is not a multiple of dp x micro_batch_size = "
                f"{self.dp} x {self.micro_batch_size} = {share}",
                help=f"use a global batch size of {max(share, global_batch_size // share * share)}",
            )
        return global_batch_size // share

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``tp=8,pp=4,dp_shard=8,micro_batch_size=1,recompute=selective``, or as a layout is printed.

        Raises:
            ConfigError: an item is not ``name=value``, a name is unknown or repeated, or a value is out of range.
        """
        return cls(**parse_assignments(text))

    def __str__(self) -> str:
        """The axes that are used, as `parse` reads them: ``dp_shard=8 tp=8 pp=4 zero=1 micro_batch=1 recompute=none 1f1b``."""
        degrees = ("dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp", "pp", "ep", "etp", "num_model_chunks")
        parts = [f"{name}={getattr(self, name)}" for name in degrees if getattr(self, name) > 1]
        if self.dp_shard > 1 or self.zero_stage != _default_zero_stage({"cp": self.cp, "pp": self.pp}):
            parts.append(f"zero={self.zero_stage}")
        wider = ("gradient_shard", "optimizer_shard")
        parts += [f"{name}={getattr(self, name)}" for name in wider if getattr(self, name) > 1]
        part = f"x{self.recompute_fraction:g}" if self.recompute_fraction < 1 else ""
        if self.vocabulary != "ends":
            parts.append(f"vocabulary={self.vocabulary}")
        if self.sequence_parallel != (self.tp > 1):
            parts.append("sequence_parallel=false")
        parts += [f"micro_batch={self.micro_batch_size}", f"recompute={self.recompute}{part}"]
        if self.offload != "none":
            parts.append(
                f"offload={self.offload}" + (f"x{self.offload_fraction:g}" if self.offload_fraction < 1 else "")
            )
        if self.offload_activations:
            parts.append(f"offload_activations={self.offload_activations:g}")
        if self.offload_to != "host":
            parts.append(f"offload_to={self.offload_to}")
        if self.pp > 1:
            parts.append(self.schedule)
        return " ".join(parts)


INTEGER_FIELDS = (
    "dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp", "pp", "ep", "etp", "num_model_chunks", "micro_batch_size",
    "zero_stage", "gradient_shard", "optimizer_shard",
)  # fmt: skip
"""Fields of a Layout that are whole numbers."""


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Some fields of a Layout, each valid by itself: what `plan` is asked to keep.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    for name, value in fields.items():
        info = Layout.model_fields.get(name)
        if info is None:
            near = difflib.get_close_matches(name, Layout.model_fields, n=3, cutoff=0.5)
            like = [field for field in Layout.model_fields if name and field.startswith(name)] or near
            known = f"did you mean {' or '.join(like)}? " if like else ""
            raise ConfigError(
                f"unknown layout field {name!r}", help=f"{known}fields are {', '.join(Layout.model_fields)}"
            )
        try:
            field: Any = Annotated[info.annotation, *info.metadata, "without its default"]
            TypeAdapter(field).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{name} = {shown(value)}: {error.errors()[0]['msg']}") from None
    return dict(fields)


SHORT_FIELD_NAMES = {"zero": "zero_stage", "micro_batch": "micro_batch_size"}
"""Short names under which tables show fields."""


def parse_assignments(text: str) -> dict[str, Any]:
    """``name=value,name=value`` as fields of a Layout; integers and true/false become what they say.

    What a table prints is read too: blanks between items, ``zero=1``, ``micro_batch=2``, ``recompute=fullx0.5`` for a part of the
    blocks, and a schedule by its name alone.

    Raises:
        ConfigError: an item is not ``name=value``, or a name is unknown or repeated.
    """
    fields: dict[str, Any] = {}
    for item in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text))):
        for name, value in _assignments(item):
            if name in fields:
                raise ConfigError(f"layout field {name!r} is given twice")
            fields[name] = _parse_value(name, value)
    return check_fields(fields)


def _assignments(item: str) -> list[tuple[str, str]]:
    """Fields and their values, both as text, that an item stands for."""
    if item in SCHEDULE_NAMES:
        return [("schedule", item)]
    name, equals, value = item.partition("=")
    if not equals or not value:
        raise ConfigError(f"layout item {item!r} is not name=value", help="write e.g. tp=8,pp=4,recompute=full")
    name = SHORT_FIELD_NAMES.get(name, name)
    parted = re.fullmatch(r"([a-z]+)x([\d.e-]+)", value)
    if name in ("recompute", "offload") and parted:
        return [(name, parted[1]), (f"{name}_fraction", parted[2])]
    return [(name, value)]


def format_assignments(fields: Mapping[str, Any]) -> str:
    """Fields of a Layout as `parse_assignments` reads them: ``tp=8,sequence_parallel=true``."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


def _parse_value(name: str, value: str) -> Any:
    if name in ("schedule", "recompute", "offload", "offload_to", "vocabulary") or name not in Layout.model_fields:
        return value
    if name == "sequence_parallel":
        if value not in ("true", "false"):
            raise ConfigError(f"sequence_parallel = {value!r}: must be true or false")
        return value == "true"
    is_fraction = Layout.model_fields[name].annotation is float
    try:
        return float(value) if is_fraction else int(value)
    except ValueError:
        raise ConfigError(f"{name} = {value!r}: must be a {'number' if is_fraction else 'whole number'}") from None
