"""Tasks: what a plan is for, a pretraining workload or a request to generate. Each says which phases a step consists of."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .base import Count, Frozen, OptionSpec
from .batch import Lengths
from .engine_facts import ENGINES, OWN_ENGINE, Engine, EngineFacts
from .errors import ConfigError
from .limits import MAX_GENERATED

Precision = Literal["bf16-mixed", "fp16-mixed", "bf16", "fp8", "nvfp4", "tf32", "fp32"]
Optimizer = Literal["adamw", "adamw-8bit", "sgd", "muon"]
Loss = Literal["engine", "chunked", "chunked_head", "in_place", "fused"]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]
Selective = Literal["products", "alternate_products"]
Fusion = Literal["engine", "compiled", "compiled_blocks", "composite_norm", "eager"]
Passes = Literal["backward", "zeroth_order"]
FrozenStorage = Literal["16-bit", "8-bit", "nf4"]

FULL_PRECISIONS = ("fp32", "tf32")
"""Precisions without 16-bit copies."""

NUM_DECODE_PHASES = 3
"""The decoding is cut into so many phases, each costed at its mean length."""


class Phase(Frozen):
    """Passes of a step that are alike.

    Attributes:
        num_passes: forward passes through all layers, each with a backward pass where ``has_backward``.
        tokens: of one sequence that go through the layers in one pass.
        first_context: tokens that a sequence has in the first pass, its new ones included.
        state: what passes leave for later ones: nothing; activations for the backward pass; keys and values, which the prefill
            makes and later passes read and grow.
    """

    name: str
    num_passes: Count
    tokens: Count
    first_context: Count
    state: Literal["none", "activations", "new_kv_cache", "kv_cache"] = "none"

    @property
    def has_backward(self) -> bool:
        """True for passes that leave activations, which a backward pass of each reads."""
        return self.state == "activations"

    @property
    def is_prefill(self) -> bool:
        """True for the pass over the prompt."""
        return self.state == "new_kv_cache"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the tokens that a sequence has in each pass."""
        growth = self.tokens if self.state == "kv_cache" else 0
        return tuple(self.first_context + idx * growth for idx in range(self.num_passes))


class Task(Frozen):
    """Abstract base of what a plan is for. A step consists of phases; a request may fix fields and set limits that it names."""

    fixable: ClassVar[frozenset[str] | None] = None
    """Fields that a search may be told to keep; None: those of `Layout`."""

    @property
    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a step, in order."""

    @cached_property
    def has_backward(self) -> bool:
        """Return whether gradients are made by a backward pass."""
        return any(phase.has_backward for phase in self.phases)


class LowRank(Frozen):
    """Low-rank adapters (LoRA, arXiv:2106.09685): the model is frozen, and with each chosen product W [n, k] an A [rank, k]
    and a B [n, rank] are trained.

    Attributes:
        targets: products with an adapter: q, k and v as one (qkv), the output projection (out), those of the feed-forward part.
        frozen: how the frozen products are stored; nf4 is dequantised before each use (QLoRA, arXiv:2305.14314).
        dropout: the adapter's input passes a dropout, whose output is kept besides.
    """

    rank: Count = 16
    targets: tuple[Literal["qkv", "out", "mlp"], ...] = ("qkv", "out")
    frozen: FrozenStorage = "16-bit"
    dropout: bool = True

    @property
    def frozen_bytes(self) -> float:
        """Return the bytes of one frozen weight of a product: nf4 has 4 bits and a 32-bit scale for each 64 weights."""
        return {"16-bit": 2.0, "8-bit": 1.0, "nf4": 4.5 / 8}[self.frozen]


class EngineOptions(Frozen):
    """How an engine executes a workload: switches that change seconds and bytes and not what is trained.

    Attributes:
        engine: whose kernels, host overhead and buffers a prediction is for; fsdp2 is our own runtime on torch's parts.
        attention: flash keeps no [seq, seq] matrix; math does.
        flash_generation: 1 for FlashAttention-1 and its Triton port (until mid 2023), 2 for FlashAttention-2 or what the engine has
            that is newer ("2 only": that was switched off), 3 and 4 where FlashAttention-3 (on Hopper) or 4 (on Blackwell) was
            chosen.
        fusion: of memory-bound kernels: as the engine has them, by torch.compile (of everything, or of all but the loss), or eager
            with RMSNorm as separate kernels (torch before 2.8); eager is plain model code, where each kernel keeps what it read
            besides.
        selective: what selective recompute keeps besides attention: the outputs of all products, or of every second one.
        fp8_scaling: one scale for a tensor, or for each row and column that a product runs along.
        fp8_activation_input: what a gated activation reads is kept in fp8 (Megatron's --activation-func-fp8-input-store).
        recompute_modules: what selective recompute makes again, by the names of Megatron's --recompute-modules; none: norms and
            activations, up-projections of latent attention, and scores.
        loss: as the engine makes it; chunked: of logits that are all kept, a part of the tokens after the other; chunked_head:
            with the logits of a part (torchtitan's ChunkedCELoss); in_place: gradients take the place of the logits (Transformer
            Engine's fused cross entropy); fused with the product before it: logits are there for some tokens at a time, gradients
            are made with them (Liger).
        update: of parameters after the step, or of each as soon as its gradient is there, where there is one micro-batch.
        paged_states: optimizer states lie in pages that the driver moves to the host where the device is full (bitsandbytes).
        token_dispatch: what is sent to experts on other nodes: as the engine does where it can choose, or each copy of a token by
            itself (all-to-all, Megatron's alltoall dispatcher).
        overlap: communication of data parallelism and of interleaved pipelines overlaps with compute where the engine can.
        blocking_launches: the host waits for every kernel it launches (CUDA_LAUNCH_BLOCKING=1): its time adds to the device's, and
            nothing overlaps.
    """

    engine: Engine = OWN_ENGINE
    attention: Literal["flash", "math"] = "flash"
    flash_generation: Literal[1, 2, 3, 4, "2 only"] = 2
    fusion: Fusion = "engine"
    selective: Selective = "products"
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    fp8_activation_input: bool = False
    recompute_modules: tuple[Module, ...] = ()
    loss: Loss = "engine"
    update: Literal["step", "in_backward"] = "step"
    paged_states: bool = False
    token_dispatch: Literal["engine", "copies"] = "engine"
    overlap: bool = True
    blocking_launches: bool = False

    @property
    def overlaps(self) -> bool:
        """Return whether communication may run beside compute."""
        return self.overlap and not self.blocking_launches

    @property
    def sends_tokens_once_per_node(self) -> bool:
        """Return whether a token is sent once to each node and copied there."""
        return self.token_dispatch == "engine" and self.engine_facts.sends_tokens_once_per_node

    @property
    def engine_facts(self) -> EngineFacts:
        """Return the record of the engine."""
        return ENGINES[self.engine]

    @property
    def calibration_engine(self) -> str:
        """Return the engine whose measured coefficients hold."""
        return self.engine_facts.calibrated_as or self.engine

    @property
    def code(self) -> Fusion:
        """Return whose memory-bound kernels run: ``fusion``, or what the engine's own are where they are plain code."""
        return self.engine_facts.code if self.fusion == "engine" else self.fusion

    @property
    def keeps_alternate_products(self) -> bool:
        """Return whether selective recompute keeps the outputs of every second product only."""
        return "alternate_products" in (self.selective, self.engine_facts.selective)


class Workload(EngineOptions, Task):
    """One training step, and how an engine executes it (`EngineOptions`).

    Attributes:
        seq_len: tokens of one sequence.
        global_batch_size: sequences of one step over the entire cluster.
        precision: of the matrix products. The mixed ones keep fp32 master parameters; bf16 keeps
            parameters, gradients and optimizer states in bf16. fp32 and tf32 keep everything in fp32; fp32 multiplies so on
            the vector units, tf32 on the matrix units, which read 10 bits of each mantissa.
        optimizer: adamw keeps two states per parameter, adamw-8bit in a byte each, muon one (orthogonalised by Newton-Schulz
            steps), sgd (no momentum) none.
        passes: zeroth_order replaces the backward pass and the optimizer by a second forward pass and a step along a random
            direction (runtime/training/optimizer.py): no gradients, no states, nothing kept between the passes.
        adapters: train only low-rank adapters of a frozen model; None trains every parameter.
        document_len: mean tokens of the documents that are packed into one sequence and attend only to themselves; None: one.
        lengths: of the sequences of a batch, where they differ (docs/batch.md); ``seq_len`` is then the longest.
        dropout: after attention and feed-forward part, as Megatron-LM has it by default; our runtime has none.
        expert_imbalance: (ep, rows of the rank with most over the average) for degrees of expert parallelism, from measured loads
            (planner/expert_load.py); degrees that are not listed are even.
    """

    seq_len: Count
    global_batch_size: Count
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    passes: Passes = "backward"
    adapters: LowRank | None = None
    document_len: Count | None = None
    lengths: Annotated[Lengths | None, OptionSpec(is_option=False)] = Field(
        default=None, exclude_if=lambda value: value is None
    )
    dropout: bool = False
    expert_imbalance: tuple[tuple[Count, Annotated[float, Field(ge=1)]], ...] = ()

    @model_validator(mode="after")
    def _is_of_our_runtime(self) -> Workload:
        if not self.has_backward and not self.engine_facts.is_own_runtime:
            raise ValueError(f"zeroth-order training is our runtime's (engine {OWN_ENGINE}), not {self.engine}'s")
        if self.lengths is not None and self.lengths.lengths[-1] > self.seq_len:
            raise ValueError(
                f"the longest of the lengths has {self.lengths.lengths[-1]} tokens, seq_len is {self.seq_len}"
            )
        if self.recompute_modules and not self.engine_facts.is_eager_like_megatron:
            raise ValueError(f"recompute_modules are Megatron's: engine {self.engine} has none")
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the one phase of a step: forward and backward, or twice forward where training is of zeroth order."""
        is_backward = self.passes == "backward"
        return (
            Phase(
                name="step",
                num_passes=1 if is_backward else 2,
                tokens=self.seq_len,
                first_context=self.seq_len,
                state="activations" if is_backward else "none",
            ),
        )

    @property
    def library_parts(self) -> tuple[str, ...]:
        """Return the parts of a step that are made by libraries besides an engine (Liger, bitsandbytes, torchtune)."""
        parts = (
            (self.loss not in ("engine", self.engine_facts.optional_loss), f"the {self.loss} loss"),
            (self.optimizer == "adamw-8bit", "adamw-8bit"),
            (self.paged_states, "paged optimizer states"),
            (self.update == "in_backward", "updates within the backward pass"),
        )
        return tuple(text for holds, text in parts if holds)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step over the entire cluster; where lengths differ those of a mean step."""
        if self.lengths is not None:
            return max(1, round(self.lengths.mean * self.global_batch_size))
        return self.seq_len * self.global_batch_size

    @property
    def attended_len(self) -> int:
        """Return the tokens within which attention is causal: a sequence, or a document of a packed one.

        Of documents of several lengths those of one at which as many pairs attend for each token.
        """
        if self.lengths is not None:
            return self.lengths.attended_len(self.seq_len)
        return min(self.seq_len, self.document_len or self.seq_len)

    @property
    def is_full_precision(self) -> bool:
        """Return whether parameters and activations are in fp32, whichever units multiply them."""
        return self.precision in FULL_PRECISIONS

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of one element of gathered parameters and of activations."""
        return 4 if self.is_full_precision else 2

    @property
    def optimizer_bytes(self) -> float:
        """Return the bytes of optimizer state for one trained parameter; states of 8 bits have a scale for each 256 of them."""
        of_states = {"adamw": 2, "muon": 1, "sgd": 0}
        each = 2 * (1 + 4 / 256) if self.optimizer == "adamw-8bit" else of_states[self.optimizer] * self.master_bytes
        return each if self.has_backward else 0

    @property
    def master_bytes(self) -> int:
        """Return the bytes of one element of trained parameters, gradients and optimizer states, as the optimizer sees them."""
        return 2 if self.precision == "bf16" else 4


class Generation(Task):
    """A request to generate: for every sequence of a batch ``generate_len`` tokens after a prompt of ``prompt_len``.

    ``across_nodes``: devices of several nodes may hold the model together.
    """

    fixable: ClassVar[frozenset[str] | None] = frozenset({"batch_size", "tp"})

    prompt_len: Count
    generate_len: Annotated[Count, Field(le=MAX_GENERATED)]
    precision: Literal["bf16", "fp16", "tf32", "fp32"] = "bf16"
    across_nodes: bool = Field(default=False, exclude_if=lambda value: not value)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the prefill, which makes the first token, and the passes of all others in NUM_DECODE_PHASES phases."""
        prompt = self.prompt_len
        phases = [Phase(name="prefill", num_passes=1, tokens=prompt, first_context=prompt, state="new_kv_cache")]
        num_passes, num_phases = self.generate_len - 1, min(NUM_DECODE_PHASES, self.generate_len - 1)
        first = prompt + 1
        for idx in range(num_phases):
            count = num_passes // num_phases + (idx < num_passes % num_phases)
            name = f"decode {idx + 1}/{num_phases}"
            phases.append(Phase(name=name, num_passes=count, tokens=1, first_context=first, state="kv_cache"))
            first += count
        return tuple(phases)

    @property
    def total_len(self) -> int:
        """Return the tokens of a sequence at the end."""
        return self.prompt_len + self.generate_len

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a weight, a key, a value or a hidden state."""
        return 4 if self.precision in FULL_PRECISIONS else 2

    @property
    def training_precision(self) -> Precision:
        """Return the precision of training whose matrix products are the same."""
        precisions: dict[str, Precision] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}
        return precisions[self.precision]


_ADAPTER_FIELDS = {"r": "rank", "rank": "rank", "targets": "targets", "frozen": "frozen", "dropout": "dropout"}


def parse_training(text: str) -> dict[str, Any]:
    """Read ``full``, ``lora:r=16,targets=qkv+out`` or ``zeroth-order`` as fields of a Workload.

    Raises:
        ConfigError: none of the forms; an option is unknown, repeated or out of range.
    """
    how, colon, rest = text.partition(":")
    if how == "full" and not colon:
        return {}
    if how == "zeroth-order" and not colon:
        return {"passes": "zeroth_order"}
    if how == "lora":
        return {"adapters": _adapters(rest)}
    raise ConfigError(
        f"--train {text!r} is unknown",
        help="full, lora:r=16,targets=qkv+out, lora:r=64,frozen=nf4, zeroth-order",
    )


def _adapters(text: str) -> LowRank:
    fields: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in _ADAPTER_FIELDS:
            raise ConfigError(
                f"adapter option {item!r} is unknown", help="r=16, targets=qkv+out+mlp, frozen=nf4, dropout=false"
            )
        if _ADAPTER_FIELDS[name] in fields:
            raise ConfigError(f"adapter option {name!r} is given twice")
        fields[_ADAPTER_FIELDS[name]] = tuple(value.split("+")) if name == "targets" else value
    return LowRank(**fields)
