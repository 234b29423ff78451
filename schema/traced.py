"""What was counted, and found out by trial, of a model that is somebody else's code.

profilers/modules.py counts; cost_models/ turn the counts into seconds and bytes as they do for known layers.
"""

from __future__ import annotations

from typing import Any, Literal

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveInt
from .placements import UnitPlacement, UnitWork, WholeUnit

TracedShard = Literal["none", "column", "row"]


class TracedProduct(Frozen):
    """``count`` products [rows, k] x [k, n] of one sequence; those of attention without a fused kernel are products, too.

    ``matrices`` of experts share the rows; ``shard``: what tensor parallelism cuts, columns (n) or rows (k) of the second.
    """

    rows: PositiveInt
    n: PositiveInt
    k: PositiveInt
    matrices: PositiveInt = 1
    shard: TracedShard = "none"
    count: PositiveInt = 1


class TracedAttention(Frozen):
    """``count`` fused attentions of one sequence; a query sees ``context`` of ``kv_len`` keys on average.

    ``split``: tensor parallelism divides its heads.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt
    query_len: PositiveInt
    kv_len: PositiveInt
    context: NonNegativeFloat
    split: bool = False
    count: PositiveInt = 1


class TracedSplit(Frozen):
    """The part of a layer's counts that tensor parallelism divides, beside its products.

    Attributes:
        num_params, forward_elements, backward_elements, saved_elements, selective_elements: of those of the layer.
        gathered_elements: of the saved ones those that products split by output read: whole under sequence parallelism.
        num_sums: outputs that are summed over the ranks in a forward pass.
    """

    num_params: NonNegativeInt
    forward_elements: NonNegativeInt = 0
    backward_elements: NonNegativeInt = 0
    saved_elements: NonNegativeInt = 0
    selective_elements: NonNegativeInt = 0
    gathered_elements: NonNegativeInt = 0
    num_sums: NonNegativeInt = 0


class Traced(Frozen):
    """One layer and one sequence of ``seq_len`` tokens; elements are those of the compute dtype.

    Attributes:
        products, attentions: of the forward pass; the backward pass follows from them.
        forward_elements, backward_elements: read and written by all other kernels; *_kernels: how many there are.
        saved_elements: kept from the forward to the backward pass; selective_elements, full_elements: the same where all but
            products and attention, and where everything is computed again.
        split: what tensor parallelism divides; None where the code does not say.
    """

    seq_len: PositiveInt
    num_params: NonNegativeInt
    products: tuple[TracedProduct, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    forward_elements: NonNegativeInt = 0
    backward_elements: NonNegativeInt = 0
    forward_kernels: NonNegativeInt = 0
    backward_kernels: NonNegativeInt = 0
    saved_elements: NonNegativeInt = 0
    selective_elements: NonNegativeInt = 0
    full_elements: NonNegativeInt = 0
    split: TracedSplit | None = None


class SampleTensor(Frozen):
    """A tensor that a module is called with: its name, empty where it goes by position, the shape of one sample, and the type."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtype: str


_NO_FACTS = {"class_name", "blocks", "sample", "arguments", "coupling", "works", "placements", "unplaced"}


class CodeFacts(Frozen):
    """What `parallelize` can do with a module, found out by trial when it was traced: reasons are empty where it can.

    Attributes:
        class_name: of the module.
        blocks: path of the container of its blocks; sample: what one call takes, empty where that is more than tensors;
            arguments: names of all that it takes, or as many empty ones as it takes by position.
        not_split: why tensor parallelism does not split its layers; not_along_sequence: why not with sequence parallelism.
        split_widths: what tensor parallelism must divide: heads, and widths of the layers that it splits.
        not_staged: why its blocks cannot be stages of a pipeline.
        not_sharded: why `fully_shard` does not take it, so that only whole fp32 replicas run.
        min_samples: in a micro-batch: two where batch norms have one value of each sample; coupling: what couples its samples.
        works: kinds of units whose operators can be placed, before a machine is known; placements: chosen for one, with which
            layers are split that the code's own rules do not.
        unplaced: units that stay whole on every rank.
    """

    class_name: str
    blocks: str
    sample: tuple[SampleTensor, ...] = ()
    arguments: tuple[str, ...] = ()
    not_split: str = ""
    not_along_sequence: str = ""
    split_widths: tuple[PositiveInt, ...] = ()
    not_staged: str = ""
    not_sharded: str = ""
    min_samples: PositiveInt = 1
    coupling: str = ""
    works: tuple[UnitWork, ...] = ()
    placements: tuple[UnitPlacement, ...] = ()
    unplaced: tuple[WholeUnit, ...] = ()

    @property
    def placed_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism for which units are placed."""
        return tuple(sorted({placement.num_ranks for placement in self.placements}))

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of ProblemFacts."""
        facts = self.model_dump(exclude=_NO_FACTS)
        if self.placements:
            facts |= {"not_split": "", "not_along_sequence": "units are placed between whole values"}
        return facts | {"placed_degrees": self.placed_degrees}
