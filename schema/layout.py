"""Layout: the degrees and the global choices of one way to parallelize a training run.

The annotated fields of `Layout` are the table of fields: what costs depend on each, how it is printed, what the search tries.
`LayoutTable` (layout_table.py), the text form and the command line are made from it, so that a new axis is one field here, its
rules (layout_rules.py), its cost, its file in runtime/ and its parity case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from .base import Count, Frozen, did_you_mean, shown
from .errors import ConfigError
from .schedules import SCHEDULE_NAMES, ScheduleName
from .units import Numbers, gcd, maximum, where

Recompute = Literal["none", "selective", "full"]
LayoutRecompute = Literal["none", "selective", "full", "mixed"]
Offload = Literal["none", "optimizer", "parameters", "scheduled"]
Vocabulary = Literal["ends", "split"]
OffloadTarget = Literal["host", "storage"]
Gradients = Literal["fp32", "compute"]

Scope = Literal["layer", "expert_layer", "operators", "data"]
"""What depends on a field: the work of one layer on one micro-batch (of every layer, or only of those with experts), the shapes of
a layer's operators, the data-parallel collectives of a layer."""


class Degrees:
    """Quantities that follow from the degrees, for numbers and for arrays with one entry per layout.

    Within a stage tp counts fastest, then cp, dp_shard, dp_replicate. Experts fold onto the same ranks: the ranks of one expert
    count fastest, then ep, then the copies of the experts.
    """

    if TYPE_CHECKING:
        dp_replicate: Numbers
        dp_shard: Numbers
        tp: Numbers
        cp: Numbers
        pp: Numbers
        ep: Numbers
        etp: Numbers
        zero_stage: Numbers
        gradient_shard: Numbers
        optimizer_shard: Numbers

    @cached_property
    def dp(self) -> Numbers:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def stage_ranks(self) -> Numbers:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @cached_property
    def is_piped(self) -> Any:
        """Several stages."""
        return self.pp > 1

    @cached_property
    def world_size(self) -> Numbers:
        """Ranks."""
        return self.stage_ranks * self.pp

    @cached_property
    def gradient_level(self) -> Numbers:
        """Data-parallel ranks over which gradients are sharded, under the ZeRO stages that shard them."""
        return maximum(self.gradient_shard, self.dp_shard)

    @cached_property
    def optimizer_level(self) -> Numbers:
        """Data-parallel ranks over which optimizer states are sharded, under the ZeRO stages that shard them."""
        return maximum(self.optimizer_shard, self.gradient_level)

    @cached_property
    def has_levels(self) -> Numbers:
        """Some state is sharded over more ranks than dp_shard."""
        return self.optimizer_level > self.dp_shard

    @cached_property
    def num_shards(self) -> Numbers:
        """Ranks that shard the states of what is no expert, parameters at least: context ranks share in it.

        Gradients and optimizer states may be sharded over more of them: `num_gradient_shards`, `num_optimizer_shards`.
        """
        return where(self.zero_stage > 0, self.dp_shard * self.cp, self.dp_shard)

    @cached_property
    def num_gradient_shards(self) -> Numbers:
        """Ranks that shard gradients, a multiple of ``num_shards``."""
        return self.num_shards * maximum(self.gradient_shard // self.dp_shard, 1)

    @cached_property
    def num_optimizer_shards(self) -> Numbers:
        """Ranks that shard optimizer states, a multiple of ``num_gradient_shards``."""
        return maximum(self.num_shards * maximum(self.optimizer_shard // self.dp_shard, 1), self.num_gradient_shards)

    @cached_property
    def num_replicas(self) -> Numbers:
        """Groups of ``num_shards`` ranks that hold the same shards."""
        return where(self.zero_stage > 0, self.dp_replicate, self.dp_replicate * self.cp)

    @cached_property
    def experts_follow_tp(self) -> Numbers:
        """Experts have no axes of their own: they are split over tp like every feed-forward part."""
        return (self.ep == 1) & ((self.etp == 1) | (self.etp == self.tp))

    @cached_property
    def expert_tp(self) -> Numbers:
        """Ranks that share one expert."""
        return where(self.experts_follow_tp, self.tp, self.etp)

    @cached_property
    def expert_copies(self) -> Numbers:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.stage_ranks // (self.ep * self.expert_tp)

    @cached_property
    def expert_shards(self) -> Numbers:
        """Copies over which the states of an expert are sharded: as many as lie in one group of sharded ranks."""
        ranks = maximum(self.num_shards * self.tp // (self.ep * self.expert_tp), 1)
        return where(self.zero_stage > 0, gcd(ranks, maximum(self.expert_copies, 1)), self.dp_shard)

    @cached_property
    def expert_gradient_shards(self) -> Numbers:
        """Ranks that shard the gradients of an expert, a multiple of ``expert_shards``."""
        return self._wider_expert_shards(self.num_gradient_shards, self.expert_shards)

    @cached_property
    def expert_optimizer_shards(self) -> Numbers:
        """Ranks that shard the optimizer states of an expert, a multiple of ``expert_gradient_shards``."""
        return self._wider_expert_shards(self.num_optimizer_shards, self.expert_gradient_shards)

    def _wider_expert_shards(self, num_shards: Numbers, inner: Numbers) -> Numbers:
        """Return as many of the copies of an expert as ``num_shards`` has of all ranks, in multiples of ``inner``."""
        expert_ranks = self.ep * self.expert_tp * inner
        copies = maximum(self.stage_ranks // expert_ranks, 1)
        ranks = maximum(num_shards * self.tp // expert_ranks, 1)
        return where(self.zero_stage > 0, inner * gcd(ranks, copies), inner)

    @cached_property
    def expert_replicas(self) -> Numbers:
        """Groups of ``expert_shards`` ranks that hold the same shards of the same experts."""
        return maximum(self.stage_ranks // (self.ep * self.expert_tp * self.expert_shards), 1)


def _zero_text(layout: Layout) -> str:
    is_default = layout.zero_stage == _default_zero_stage({"cp": layout.cp, "pp": layout.pp})
    return "" if layout.dp_shard == 1 and is_default else f"zero={layout.zero_stage}"


def _sequence_text(layout: Layout) -> str:
    is_default = layout.sequence_parallel == (layout.tp > 1)
    return "" if is_default else f"sequence_parallel={str(layout.sequence_parallel).lower()}"


def _scaled_text(name: str, value: str, fraction: float) -> str:
    return f"{name}={value}" + (f"x{fraction:g}" if fraction < 1 else "")


def _offload_text(layout: Layout) -> str:
    return "" if layout.offload == "none" else _scaled_text("offload", layout.offload, layout.offload_fraction)


@dataclass(frozen=True)
class LayoutField:
    """What other parts need to know of a field of `Layout`, besides its type and default.

    Attributes:
        scopes: what depends on it.
        is_degree: it counts ranks: layouts that are alike in all such fields are variants of one another.
        options: values that the search tries for a field without a step of its own in the enumeration; empty: the default only.
        text: how it stands in ``str(layout)``, empty where it is left out; None: ``name=value`` where it is not the default.
        position: where: fields of a smaller one come first, those of the same one as they are declared.
    """

    scopes: tuple[Scope, ...] = ()
    is_degree: bool = False
    options: tuple[int, ...] = ()
    text: Callable[[Layout], str] | None = None
    position: int = 1


def _default_zero_stage(data: Mapping[str, Any]) -> Literal[0, 1, 3]:
    if data.get("dp_shard", 1) * data.get("cp", 1) == 1:
        return 0
    return 1 if data.get("pp", 1) > 1 else 3


class Layout(Frozen, Degrees):
    """Degrees (all >= 1) and choices; ``world_size = dp_replicate * dp_shard * cp * tp * pp``.

    Attributes:
        dp_replicate: copies of the model, sharded or not, each training on sequences of its own.
        dp_shard: ranks of a copy that share its states as zero_stage says, each training on sequences of its own.
        cp: ranks that share each sequence; parameters are sharded over them too (over dp_shard * cp ranks).
        cp_ulysses: of the cp ranks, neighbours that exchange tokens for heads before attention and back after it (Ulysses);
            the cp / cp_ulysses groups of them pass keys and values round a ring.
        tp: ranks that share every layer: heads, and the width of feed-forward parts.
        pp: ranks of a pipeline; each holds a stage, or num_model_chunks of them.
        ep, etp: ranks that share the experts of a layer, and that share one expert; both fold onto the other ranks of a stage.
            With ep = etp = 1 experts have no axes of their own: they are split over tp like every feed-forward part.
        num_model_chunks: stages that each rank holds; chunk k of rank r is stage k pp + r, or counted back in every second
            chunk under the V schedules (zb-v, v-half, v-min: two chunks).
        zero_stage: what dp_shard shards: 0 nothing (dp_shard = 1), 1 optimizer states, 2 and gradients, 3 and parameters.
            Unset, it is the deepest stage that can be executed: 3, or 1 under a pipeline.
        gradient_shard, optimizer_shard: data-parallel ranks (context ranks come on top, as for dp_shard) over which gradients and
            optimizer states are sharded where those are more than dp_shard has: each a multiple of the narrower one, and under
            zero_stage 2, which leaves parameters unsharded, the optimizer states alone. 1: as the narrower one.
        prefetch: blocks whose parameters are gathered while another one computes, under zero_stage 3.
        vocabulary: where embedding and head are: on the first and the last stage, or each split over all stages.
        sequence_parallel: activations between tensor-parallel regions are split over tp along the sequence. Unset: tp > 1.
        micro_batch_size: sequences of one forward and backward pass on a data-parallel rank.
        recompute: activations recomputed in the backward pass: none; selective keeps the outputs of matrix products and
            of attention; full keeps the input of each block; mixed: each block as the stages of the plan say.
        recompute_fraction: part of each stage's blocks that recompute; the others keep everything.
        offload: what lies in the memory of the host instead of the device's: the optimizer states with the fp32 parameters, which
            the host updates; and the parameters too, which come back for every pass; scheduled: as the plan's offload schedule
            says, layer by layer (schema/offload.py).
        offload_fraction: part of the optimizer states that is offloaded; parameters are offloaded entirely or not at all.
        offload_activations: part of the saved activations that waits for the backward pass in the host's memory.
        offload_to: host memory or, beyond it, the node's storage.
        gradients: dtype in which an engine other than ours adds up the gradients of micro-batches and reduces them: fp32, or that
            of the products.
        tp_overlap: tensor-parallel communication runs chunk by chunk along with the products that need or make it (Transformer
            Engine's userbuffers).
        tp_halves: dense blocks take a micro-batch as two half-batches, whose tensor-parallel communication runs along with each
            other's products; of a plan's kinds of layers those that it does not name as whole.
        cuda_graphs: the host replays one graph a layer and pass instead of dispatching its operators; of a layer with experts it
            holds what comes before the tokens are sent.
        expert_graphs: graphs hold the experts too: counts of tokens stay on the device, whose buffers have a fixed size, and the
            host replays one graph a step.
        ep_overlap: tokens travel to experts and back while another micro-batch computes: the forward pass of one along with the
            backward pass of the other, layer by layer.
        half_blocks: attention and feed-forward part of each block are layers of their own: a stage may end between them, and each
            recomputes by itself.
        schedule: order of the passes (schema/schedules.py); 1f1b and zb-h1 with chunks are their interleaved forms; synthesised is
            the order that the plan brings along.
    """

    dp_replicate: Annotated[Count, LayoutField(("data",), is_degree=True, position=0)] = 1
    dp_shard: Annotated[Count, LayoutField(("data",), is_degree=True, position=0)] = 1
    tp: Annotated[Count, LayoutField(("layer", "operators", "data"), is_degree=True)] = 1
    cp: Annotated[Count, LayoutField(("layer", "operators", "data"), is_degree=True, position=0)] = 1
    cp_ulysses: Annotated[Count, LayoutField(("layer",), position=0)] = 1
    pp: Annotated[Count, LayoutField(is_degree=True)] = 1
    ep: Annotated[Count, LayoutField(("expert_layer", "operators", "data"), is_degree=True)] = 1
    etp: Annotated[Count, LayoutField(("expert_layer", "operators", "data"), is_degree=True)] = 1
    num_model_chunks: Annotated[Count, LayoutField()] = 1
    half_blocks: Annotated[bool, LayoutField()] = False
    micro_batch_size: Annotated[
        Count,
        LayoutField(("layer", "operators"), position=2, text=lambda self: f"micro_batch={self.micro_batch_size}"),
    ] = 1
    schedule: Annotated[
        ScheduleName, LayoutField(position=4, text=lambda self: self.schedule if self.pp > 1 else "")
    ] = "1f1b"
    zero_stage: Annotated[Literal[0, 1, 2, 3], LayoutField(("data",), text=_zero_text)] = Field(
        default_factory=_default_zero_stage
    )
    gradient_shard: Annotated[Count, LayoutField(("data",))] = 1
    optimizer_shard: Annotated[Count, LayoutField(("data",))] = 1
    prefetch: Annotated[Count, LayoutField()] = 1
    vocabulary: Annotated[Vocabulary, LayoutField(("layer", "data"))] = "ends"
    sequence_parallel: Annotated[bool, LayoutField(("layer", "operators"), text=_sequence_text)] = Field(
        default_factory=lambda data: data.get("tp", 1) > 1
    )
    recompute: Annotated[
        LayoutRecompute,
        LayoutField(
            ("layer",), position=3, text=lambda self: _scaled_text("recompute", self.recompute, self.recompute_fraction)
        ),
    ] = "none"
    recompute_fraction: Annotated[float, Field(gt=0, le=1), LayoutField(("layer",), text=lambda _: "")] = 1.0
    gradients: Annotated[Gradients, LayoutField(("data",), position=3)] = "fp32"
    tp_overlap: Annotated[bool, LayoutField(("layer",), position=3)] = False
    tp_halves: Annotated[bool, LayoutField(("layer",), position=3)] = False
    cuda_graphs: Annotated[bool, LayoutField(("layer",), position=3)] = False
    expert_graphs: Annotated[bool, LayoutField(("expert_layer",), position=3)] = False
    ep_overlap: Annotated[bool, LayoutField(("expert_layer",), position=3)] = False
    offload: Annotated[Offload, LayoutField(("layer", "data"), position=3, text=_offload_text)] = "none"
    offload_fraction: Annotated[float, Field(gt=0, le=1), LayoutField(("layer",), text=lambda _: "")] = 1.0
    offload_activations: Annotated[float, Field(ge=0, le=1), LayoutField(("layer",), position=3)] = 0.0
    offload_to: Annotated[OffloadTarget, LayoutField(("layer", "data"), position=3)] = "host"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # A stage may shard over cp alone; without a stage cp only replicates.
        if (self.dp_shard > 1 and self.zero_stage == 0) or (self.dp_shard * self.cp == 1 and self.zero_stage > 0):
            raise ValueError(
                f"zero_stage {self.zero_stage} with dp_shard {self.dp_shard}: a stage above 0 needs dp_shard > 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")
        if self.expert_graphs and not self.cuda_graphs:
            raise ValueError("expert_graphs needs cuda_graphs: it is what they hold besides the rest of a layer")
        if self.offload == "parameters" and (self.offload_fraction < 1 or self.zero_stage not in (0, 3)):
            raise ValueError("offload of parameters needs offload_fraction 1 and zero_stage 3 (or one rank)")
        if self.offload == "scheduled" and (self.offload_activations > 0 or self.offload_fraction < 1):
            raise ValueError(
                "offload=scheduled needs no offload_fraction nor offload_activations: its schedule has them by layer"
            )
        return self

    def num_microbatches(self, global_batch_size: int) -> int:
        """Return the micro-batches of one step on the data-parallel rank that has most; where the batch divides, on each."""
        return int(-(-global_batch_size // (self.dp * self.micro_batch_size)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tp=8,pp=4,dp_shard=8,micro_batch_size=1,recompute=selective``, or a layout as it is printed.

        Raises:
            ConfigError: an item is not ``name=value``, a name is unknown or repeated, or a value is out of range.
        """
        return cls(**parse_assignments(text))

    def __str__(self) -> str:
        """Show the used fields as `parse` reads them: ``dp_shard=8 tp=8 pp=4 zero=1 micro_batch=1 recompute=none 1f1b``."""
        texts = []
        for name, field in sorted(LAYOUT_FIELDS.items(), key=lambda item: item[1].position):
            value = getattr(self, name)
            if field.text is not None:
                texts.append(field.text(self))
            elif value != type(self).model_fields[name].default:
                texts.append(f"{name}={value:g}" if isinstance(value, float) else format_assignments({name: value}))
        return " ".join(filter(None, texts))


LAYOUT_FIELDS: dict[str, LayoutField] = {
    name: next(item for item in info.metadata if isinstance(item, LayoutField))
    for name, info in Layout.model_fields.items()
}
"""The table of fields."""

SWITCHES = ("gradients", "tp_overlap", "tp_halves", "cuda_graphs", "ep_overlap")
"""Fields that change what an engine does within given degrees, off by default; which engine has which: `layout_rules`."""


@cache
def choices(name: str) -> tuple[str, ...]:
    """Return the values of a field that is a choice among names; none for numbers and switches."""
    values = get_args(Layout.model_fields[name].annotation)
    return values if values and isinstance(values[0], str) else ()


SHORT_FIELD_NAMES = {"zero": "zero_stage", "micro_batch": "micro_batch_size"}
"""Short names under which tables show fields."""


def check_fields(fields: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Check fields that `plan` is asked to keep, each by itself: of a Layout, or ``names``, whose values are counts.

    Raises:
        ConfigError: a name is unknown or a value out of range.
    """
    names = Layout.model_fields if names is None else names
    for name, value in fields.items():
        if name not in names:
            begun = [field for field in names if name and field.startswith(name)]
            hint = f"did you mean {' or '.join(begun)}?" if begun else did_you_mean(name, [*names])
            raise ConfigError(f"unknown layout field {name!r}", help=f"{hint} fields are {', '.join(names)}".strip())
        info = Layout.model_fields.get(name)
        try:
            field: Any = Count if info is None else Annotated[info.annotation, *info.metadata, "without its default"]
            TypeAdapter(field).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{name} = {shown(value)}: {error.errors()[0]['msg']}") from None
    return dict(fields)


def parse_assignments(text: str, names: Collection[str] | None = None) -> dict[str, Any]:
    """Read ``name=value,name=value`` as fields of a Layout, or as ``names``; integers and true/false become what they say.

    What a table prints is read too: blanks between items, ``zero=1``, ``micro_batch=2``, ``recompute=fullx0.5`` for a part of the
    blocks, and a schedule by its name alone.

    Raises:
        ConfigError: an item is not ``name=value``, or a name is unknown or repeated.
    """
    fields: dict[str, Any] = {}
    for item in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text))):
        name, _, value = ("schedule", "=", item) if item in SCHEDULE_NAMES else item.partition("=")
        if not value:
            raise ConfigError(f"layout item {item!r} is not name=value", help="write e.g. tp=8,pp=4,recompute=full")
        name = SHORT_FIELD_NAMES.get(name, name)
        words = {name: value}
        if name in ("recompute", "offload") and (scaled := re.fullmatch(r"([a-z]+)x([\d.e-]+)", value)):
            words = {name: scaled[1], f"{name}_fraction": scaled[2]}
        if twice := fields.keys() & words:
            raise ConfigError(f"layout field {min(twice)!r} is given twice")
        fields |= {key: _parse_value(key, word, names) for key, word in words.items()}
    return check_fields(fields, names)


def _parse_value(name: str, text: str, names: Collection[str] | None) -> Any:
    is_count = names is not None and name in names
    if not is_count and (name not in Layout.model_fields or choices(name)):
        return text
    kind = int if is_count else Layout.model_fields[name].annotation
    try:
        return {"true": True, "false": False}[text] if kind is bool else float(text) if kind is float else int(text)
    except (KeyError, ValueError):
        what = "true or false" if kind is bool else "a number" if kind is float else "a whole number"
        raise ConfigError(f"{name} = {text!r}: must be {what}") from None


def format_assignments(fields: Mapping[str, Any]) -> str:
    """Write fields of a Layout as `parse_assignments` reads them: ``tp=8,sequence_parallel=true``."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())
