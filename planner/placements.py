"""Placements of a user's module for a cluster: each kind of unit solved for each degree, with the operator models' seconds.

The answer is what the rest of the planner knows of tensor parallelism of code: which products, parameters and traffic it divides,
and how many sums over ranks that takes (`TracedSplit`). So the one search chooses the degree, and its certificate covers what was
chosen here: each program is solved to its bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..cost_models.coefficients import Scenario
from ..cost_models.hardware.collectives import Op, collective_s
from ..cost_models.hardware.compute import DeviceRates
from ..cost_models.hardware.machine import device_rates
from ..schema import ClusterSpec, ModelSpec, Workload
from ..schema.layers import Block, Embedding, Head, Layer, LayerRun
from ..schema.placement_forms import Form, Move, moves
from ..schema.placements import OperatorWork, UnitPlacement, UnitWork
from ..schema.traced import Traced, TracedShard, TracedSplit
from ..solvers.placements import Choice, PlacementInstance, conversions, solve

STATE_BYTES = 16
"""Of one trained parameter: value, gradient and two moments in fp32; a frozen one has its value."""

STATES_TO_TRANSFER = 2.0
"""States that a rank does not keep are worth so many times their transfer: tensor parallelism is for memory, too."""

SMALL_PART = 0.01
"""Of a unit's parameters: what is less (norms, biases) is worth its bytes, without what starting a transfer takes."""

_COLLECTIVES: dict[Move, tuple[tuple[Op, bool], ...]] = {
    "sum": (("all_reduce", False),), "gather": (("all_gather", False),), "scatter": (("reduce_scatter", False),),
    "exchange": (("all_to_all", True),),
}  # fmt: skip
"""Collectives of a conversion, and whether they move a rank's part of the value, not all of it."""


class _Signature(NamedTuple):
    ins: tuple[str, ...]
    outs: tuple[str, ...]

    @classmethod
    def parse(cls, written: str) -> _Signature:
        ins, _, outs = written.partition(";")[0].partition(">")
        return cls(*(tuple(form for form in side.split(",") if form) for side in (ins, outs)))

    @property
    def is_cut(self) -> bool:
        return any(form[0] in "SP" for form in (*self.ins, *self.outs)) and "S" in "".join((*self.ins, *self.outs))


def with_placements(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> ModelSpec:
    """Return a model whose units were traced with placements of them for a cluster, and what these divide."""
    assert model.code is not None
    scenario = Scenario.build(workload, cluster)
    placed = list[UnitPlacement]()
    for work in model.code.works:
        before = placed[-1] if work.in_evaluation else None
        placed.append(Placing(work, scenario, dict(before.parameters) if before else {}).place())
    code = model.code.replace(works=(), placements=tuple(placed))
    if not placed:
        return model.replace(code=code)
    degree = min(placement.num_ranks for placement in placed)
    in_training = ((w, p) for w, p in zip(model.code.works, placed, strict=True) if not p.in_evaluation)
    pairs = [(w, p) for w, p in in_training if p.num_ranks == degree]
    runs = []
    first_block = 0
    for run in model.layers:
        block = f"{model.code.blocks}.{first_block}" if model.code.blocks else ""
        layer = _split(run.layer, pairs, block if isinstance(run.layer, Block) else None, model)
        first_block += run.count if isinstance(run.layer, Block) else 0
        runs.append(LayerRun(layer=layer, count=run.count))
    return model.replace(code=code, layers=tuple(runs))


@dataclass(frozen=True)
class Placing:
    """The program of one kind of unit on a cluster; ``given_forms``: forms of its parameters, by path, where they are given."""

    work: UnitWork
    scenario: Scenario
    given_forms: Mapping[str, str]

    def place(self) -> UnitPlacement:
        """Return the best placement."""
        work, n = self.work, self.work.num_ranks
        idx_of = {op.name: idx for idx, op in enumerate(work.operators)}
        path_of = dict(work.parameters)
        pinned = {op.name: self.given_forms.get(path_of.get(op.name, "")) for op in work.operators}
        options = [[f">{form}"] if (form := pinned[op.name]) else list(op.signatures) for op in work.operators]
        signatures = [list(map(_Signature.parse, texts)) for texts in options]
        rates = device_rates(self.scenario)
        choices = [
            [Choice(s.ins, s.outs, self._seconds(op, s, rates)) for s in of]
            for op, of in zip(work.operators, signatures, strict=True)
        ]
        reads = [[(idx_of[name], output) for name, output in op.ins] for op in work.operators]
        for name, output in work.outs:  # (C5)
            reads.append([(idx_of[name], output)])
            choices.append([Choice(("I",), (), 0.0)])
        instance = PlacementInstance(reads=reads, choices=choices, move_s=self._move_s, num_ends=len(work.outs))
        solution = solve(instance)
        assert solution.choice is not None  # all operators whole is one
        chosen = [texts[i] for texts, i in zip(options, solution.choice, strict=False)]
        done = sorted(conversions(instance, solution.choice), key=lambda c: -c[3])
        forms = {op.name: text[1:] for op, text in zip(work.operators, chosen, strict=True)}
        parameters = [op for op in work.operators if op.op == "parameter"]
        moved = sum(seconds for *_, seconds in done)
        return UnitPlacement(
            paths=work.paths, num_ranks=n, described=work.described, trained_inputs=work.trained_inputs,
            signatures=tuple(s for op, s in zip(work.operators, chosen, strict=True) if op.op not in ("parameter", "given")),
            parameters=tuple((path_of[op.name], forms[op.name]) for op in parameters),
            num_params=sum(op.elements[0] for op in parameters),
            local_params=sum(op.elements[0] // (n if forms[op.name][0] == "S" else 1) for op in parameters),
            objective_s=solution.objective, bound_s=min(solution.bound, solution.objective),
            compute_s=max(0.0, solution.objective - moved), conversion_s=moved,
            conversions=tuple((work.operators[v[0]].name, t, u, seconds) for v, t, u, seconds in done),
            in_evaluation=work.in_evaluation,
        )  # fmt: skip

    def _seconds(self, op: OperatorWork, signature: _Signature, rates: DeviceRates) -> float:
        n = self.work.num_ranks
        if op.op == "parameter":
            if signature.outs[0][0] == "S":
                return 0.0
            size = float((STATE_BYTES if op.is_trained else op.element_bytes) * op.elements[0])
            is_small = op.elements[0] < SMALL_PART * self._num_params
            return STATES_TO_TRANSFER * (size * self._byte_s if is_small else self._collective_s("all_gather", size))
        if op.op == "given":
            return 0.0
        passes = (3.0 if op.flops else 2.5) if op.is_trained else 1.0  # the backward pass of a product is two of them
        divided = n if signature.is_cut else 1
        seconds = 0.0 if op.moves_nothing else rates.kernel_s * passes
        if op.flops:
            seconds += passes * (rates.launch_s + op.flops / divided / rates.gemm_flops_per_s)
        elif not op.moves_nothing:
            traffic = 2 * sum(op.elements) * rates.compute_bytes
            seconds += passes * traffic / divided / rates.elementwise_bytes_per_s
        return seconds

    @property
    def _num_params(self) -> int:
        return sum(op.elements[0] for op in self.work.operators if op.op == "parameter")

    @property
    def _byte_s(self) -> float:
        """Seconds of one byte of a large all-gather over the ranks."""
        size = 2.0**26
        return self._collective_s("all_gather", size) / size

    @cached_property
    def _collectives(self) -> dict[tuple[Op, float], float]:
        return {}

    def _collective_s(self, op: Op, size_bytes: float) -> float:
        if (op, size_bytes) not in self._collectives:  # many values of a unit have one size
            size, group = np.array([size_bytes]), np.array([self.work.num_ranks])
            seconds = collective_s(op, size, group, np.ones_like(group), self.scenario.cluster)
            self._collectives[op, size_bytes] = float(seconds[0])
        return self._collectives[op, size_bytes]

    def _move_s(self, value: tuple[int, int], source: str, target: str) -> float:
        if value[0] >= len(self.work.operators):
            return 0.0
        op = self.work.operators[value[0]]
        forward, backward = moves(Form.parse(source), Form.parse(target))
        rates = device_rates(self.scenario)
        # fp32 stays fp32 in the exchange of numbers of other types than activations, such as masks; they are small.
        size = op.elements[value[1]] * (rates.compute_bytes if op.is_trained else op.element_bytes)
        total = 0.0
        for move in (forward, backward) if op.is_trained else (forward,):
            for collective, of_part in _COLLECTIVES.get(move, ()):
                total += self._collective_s(collective, size / self.work.num_ranks if of_part else size)
            if move != "none":
                total += rates.kernel_s + size / rates.elementwise_bytes_per_s
        return max(total, 1e-12)


def _split(layer: Layer, pairs: Sequence[tuple[UnitWork, UnitPlacement]], block: str | None, model: ModelSpec) -> Layer:
    """Return a layer with what its placements divide: the units of one block, or those before and after all blocks."""
    traced = layer.counted
    if traced is None or model.code is None or not isinstance(layer, Block | Embedding | Head):
        return layer
    inside = f"{model.code.blocks}." if model.code.blocks else ""

    def belongs(path: str) -> bool:
        if block is None:
            return not path.startswith(inside) if inside else False
        return not block or path == block or path.startswith(f"{block}.")

    units = [(w, p) for w, p in pairs for path in p.paths if belongs(path)]
    if block is None:
        # Embeddings and convolutions are counted before the blocks, the rest after them (profilers/modules.py).
        units = [
            (w, p) for w, p in units if ("embedding" in _ops(w) or "conv2d" in _ops(w)) == isinstance(layer, Embedding)
        ]
    shares = _Shares.of(units, traced, model.hidden_dim)
    return layer.replace(traced=shares.applied(traced)) if units else layer


def _ops(work: UnitWork) -> set[str]:
    return {op.op for op in work.operators}


@dataclass(frozen=True)
class _Shares:
    """What placements divide of a layer."""

    num_params: int
    products: Counter[tuple[int, TracedShard]]
    attention: bool
    elements: float
    num_sums: int

    @classmethod
    def of(cls, units: Sequence[tuple[UnitWork, UnitPlacement]], traced: Traced, width: int) -> _Shares:
        products = Counter[tuple[int, TracedShard]]()
        num_params, cut, total, moved, attention = 0, 0, 0, 0.0, False
        for work, placement in units:
            forms = dict(placement.parameters)
            path_of = dict(work.parameters)
            num_params += sum(
                op.elements[0] for op in work.operators if op.op == "parameter" and forms[path_of[op.name]][0] == "S"
            )
            for op, signature in _chosen(work, placement):
                if op.flops:
                    shard: TracedShard = (
                        "none" if not signature.is_cut else "row" if "P" in signature.outs else "column"
                    )
                    products[op.flops // work.num_samples, shard] += 1
                    attention |= signature.is_cut and op.op == "scaled_dot_product_attention"
                elif not op.moves_nothing:
                    total += sum(op.elements)
                    cut += sum(op.elements) if signature.is_cut else 0
            moved += _moved_elements(work, placement) / work.num_samples
        hidden = traced.seq_len * width
        return cls(
            num_params, products, attention, cut / total if total else 0.0, max(1, math.ceil(moved / hidden - 0.5))
        )

    def applied(self, traced: Traced) -> Traced:
        """Return the counts of a layer with what is divided of them."""
        remaining = Counter(self.products)
        products = []
        for product in traced.products:
            flops = 2 * product.rows * product.n * product.k
            shard: TracedShard = next((s for s in ("row", "column") if remaining[flops, s] > 0), "none")
            remaining[flops, shard] -= product.count
            products.append(product.replace(shard=shard))
        split = TracedSplit(
            num_params=min(self.num_params, traced.num_params),
            forward_elements=int(self.elements * traced.forward_elements),
            backward_elements=int(self.elements * traced.backward_elements),
            saved_elements=int(self.elements * traced.saved_elements),
            selective_elements=int(self.elements * traced.selective_elements),
            num_sums=self.num_sums,
        )
        attentions = tuple(a.replace(split=self.attention) for a in traced.attentions)
        return traced.replace(products=tuple(products), attentions=attentions, split=split)


def _chosen(work: UnitWork, placement: UnitPlacement) -> Iterator[tuple[OperatorWork, _Signature]]:
    operators = [op for op in work.operators if op.op not in ("parameter", "given")]
    return zip(operators, map(_Signature.parse, placement.signatures), strict=True)


def _moved_elements(work: UnitWork, placement: UnitPlacement) -> float:
    """Return the elements of sums of the forward pass that would take as long as the conversions of both take, halved."""
    elements = {op.name: max(op.elements, default=0) for op in work.operators}
    part = {"sum": 1.0, "gather": 0.5, "scatter": 0.5, "exchange": 0.5 / work.num_ranks}
    return sum(
        elements[name] * sum(part.get(move, 0.0) for move in moves(Form.parse(source), Form.parse(target))) / 2
        for name, source, target, _ in placement.conversions
    )
