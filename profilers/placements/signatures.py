"""In which forms an operator works on its inputs, found out by trial: its own code on shards of random tensors.

Each combination of forms is tried: the operator runs on the parts of every rank, and what comes out is compared with what it makes
of the whole. Equal to it, in parts that join or in parts that add up: that is the form of the output. What has a gradient follows
(schema/placement_forms.py): where the output is cut or a sum, a rank's gradient of a whole input is a summand, so the input is R.

Numbers are fp64, so that what is added to a summand shows, however small: the epsilon of a norm is 1e-6 of its variance.

What a trial cannot prove is not tried: random operators, those that change running statistics, outputs that are constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.placement_forms import ENTIRE, REPEATED, SUMMAND, Form
from .localise import Call, in_double, is_inexact, tensors_of
from .parts import is_cut, joined, part_of

RUNS = (1, 2, 3)
"""Equal runs of which a dimension may consist: fused gate and up are two, fused queries, keys and values three."""

MAX_FREE_INPUTS = 3
"""Operators with more tensors (a concatenation) have them all cut alike, or one of them."""

ENTIRE_ONLY = (
    "batch_norm",
    "instance_norm",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "lstm",
    "gru",
    "rnn_",
    "set_",
    "item",
)
ALIKE = ("dropout", "zeros_like", "ones_like", "full_like", "empty_like", "alpha_dropout")
"""Operators whose output is held as their input: whatever it is, element by element."""

MASKED = 1e20
"""Entries of masks are the lowest number of their type; no other value comes near."""

RANDOM = {"dropout": "p", "scaled_dot_product_attention": "dropout_p"}
"""Operators that drop out, and which argument says how much: tried without."""


class Signature(NamedTuple):
    """Forms of an operator's tensors and of its outputs, and the variant of its numbers (localise.py)."""

    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    variant: str = ""


class Sample(NamedTuple):
    """A tensor that an operator reads or makes in a run: to draw others like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int = 0
    high: int = 1

    @classmethod
    def of(cls, tensor: Tensor) -> Sample:
        """Return the sample of a tensor; integers have a range."""
        integer = not is_inexact(tensor.dtype) and tensor.dtype != torch.bool
        bounds = (int(tensor.min()), int(tensor.max())) if integer and tensor.numel() else (0, 1)
        return cls(tuple(tensor.shape), tensor.dtype, *bounds)

    def draw(self, generator: torch.Generator, *, positive: bool = False) -> Tensor:
        """Return a random tensor like it."""
        if is_inexact(self.dtype):
            drawn = torch.randn(self.shape, generator=generator, dtype=in_double(self.dtype))
            return (drawn.abs() + 0.5 if positive else drawn).to(self.dtype)
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.8
        high = min(self.high + 1, torch.iinfo(torch.int64).max)
        return torch.randint(self.low, high, self.shape, generator=generator, dtype=self.dtype)


def entire_signatures(num_ins: int, num_outs: int) -> list[Signature]:
    """Return the two that every operator has: all ranks do all of it, with whole gradients, or with summands of them."""
    return [Signature((form,) * num_ins, (form,) * num_outs) for form in (ENTIRE, REPEATED)]


def short_name(call: Call) -> str:
    """Return an operator's name: ``view`` of ``aten.view.default``."""
    return call.name.removeprefix("aten.").rpartition(".")[0] or call.name


def find_signatures(call: Call, ins: Sequence[Sample], outs: Sequence[Sample], num_ranks: int) -> list[Signature]:
    """Return the signatures of a call whose tensors are like the samples."""
    proposed = entire_signatures(len(ins), len(outs))
    name = short_name(call)
    if any(part in name for part in ENTIRE_ONLY) or not ins or not outs:
        return proposed
    if any(part in name for part in ALIKE):
        cuts = [Form("S", dim, k) for dim, size in enumerate(outs[0].shape) for k in RUNS
                if is_cut(size, Form("S", dim, k), num_ranks)]  # fmt: skip
        same = ins[0].shape == outs[0].shape and len(ins) == 1
        return proposed + [Signature((cut,), (cut,)) for cut in cuts if same]
    still = call.with_changed(RANDOM[name], 0.0) if name in RANDOM else None
    doubled = [s._replace(dtype=in_double(s.dtype)) for s in ins]
    trial = _Trial((still or call).in_double(), doubled, outs, num_ranks)
    if not trial.runs:  # in fp64
        trial = _Trial(still or call, ins, outs, num_ranks)
    if trial.proves:
        proposed += [
            signature for combination in _combinations(ins, num_ranks) for signature in trial.signatures(combination)
        ]
    return proposed


class _Trial:
    """Random inputs of an operator, and what it makes of the whole: twice, so that no coincidence counts."""

    def __init__(self, call: Call, ins: Sequence[Sample], outs: Sequence[Sample], num_ranks: int) -> None:
        self._call, self._num_ranks = call, num_ranks
        self._shape = outs[0].shape if len(outs) == 1 else None
        self._runs: list[tuple[list[Tensor], list[Tensor]]] = []
        self._parts: dict[tuple[int, int, int, Form], Tensor] = {}
        self.runs = self.proves = False
        for seed in range(2):
            for positive in (False, True):
                generator = torch.Generator().manual_seed(seed)
                given = [sample.draw(generator, positive=positive) for sample in ins]
                made = self._run(given, "")
                if (
                    made is None
                    or len(made) != len(outs)
                    or [Sample.of(t).shape for t in made] != [o.shape for o in outs]
                ):
                    return
                if all(bool(torch.isfinite(t).all()) for t in made if is_inexact(t.dtype)):
                    break
            self._runs.append((given, made))
        self.runs = True
        self.proves = all(
            t.numel() < 2 or bool((t != t.flatten()[0]).any()) for _, made in self._runs for t in made[:1]
        )
        self._is_inexact = [is_inexact(t.dtype) for t in made]

    def _run(self, tensors: Sequence[Tensor], variant: str) -> list[Tensor] | None:
        try:
            with torch.no_grad():
                return tensors_of(self._call.run([t.clone() for t in tensors], variant, self._num_ranks, self._shape))
        except Exception:  # whatever an operator says of shapes that are not its own
            return None

    def _part(self, run: int, idx: int, rank: int, form: Form) -> Tensor:
        """Return a rank's part of an input; summands are random, not equal."""
        key = run, idx, rank, form
        if key not in self._parts:
            value = self._runs[run][0][idx]
            if form.kind != "P":
                self._parts[key] = part_of(value, form, rank, self._num_ranks)
            elif rank:
                generator = torch.Generator().manual_seed(97 + rank)
                self._parts[key] = Sample(tuple(value.shape), value.dtype).draw(generator)
            else:
                self._parts[key] = value - sum(self._part(run, idx, other, form) for other in range(1, self._num_ranks))
        return self._parts[key]

    def signatures(self, forms: tuple[Form, ...]) -> Iterator[Signature]:
        """Yield the signatures with inputs in these forms (whole ones as I, to be R)."""
        for variant in self._call.variants(self._shape, self._num_ranks):
            outs = self._outs(forms, variant)
            if outs is not None:
                ins = tuple(REPEATED if form.is_entire else form for form in forms)
                yield Signature(ins, outs, variant)
                return

    def _outs(self, forms: tuple[Form, ...], variant: str) -> tuple[Form, ...] | None:
        candidates: list[set[Form]] | None = None
        for run, (_, made) in enumerate(self._runs):
            locals_ = []
            for rank in range(self._num_ranks):
                parts = [self._part(run, idx, rank, form) for idx, form in enumerate(forms)]
                result = self._run(parts, variant)
                if result is None or len(result) != len(made):
                    return None
                if not any(
                    set(_shaped(t.shape, entire.shape, self._num_ranks)) for t, entire in zip(result, made, strict=True)
                ):
                    return None
                locals_.append(result)
            fitting = [
                {form for form in _shaped(parts[0].shape, entire.shape, self._num_ranks) if _equal(parts, form, entire)}
                for parts, entire in zip(zip(*locals_, strict=True), made, strict=True)
            ]
            candidates = fitting if candidates is None else [a & b for a, b in zip(candidates, fitting, strict=True)]
        assert candidates is not None
        outs = []
        for fitting_forms, rounds in zip(candidates, self._is_inexact, strict=True):
            if rounds:
                fitting_forms = {form for form in fitting_forms if not form.is_entire}
            if not fitting_forms:
                return None
            outs.append(min(fitting_forms, key=lambda form: (form.kind, form.runs, form.dim)))
        return tuple(REPEATED if form.is_entire else form for form in outs)


def _shaped(part: Sequence[int], entire: Sequence[int], num_ranks: int) -> Iterator[Form]:
    """Yield the forms that a part of this shape can have."""
    if tuple(part) == tuple(entire):
        yield ENTIRE
        yield SUMMAND
    elif len(part) == len(entire):
        cut = [dim for dim, (a, b) in enumerate(zip(part, entire, strict=True)) if a != b]
        if len(cut) == 1 and part[cut[0]] * num_ranks == entire[cut[0]]:
            for runs in RUNS:
                if entire[cut[0]] % (runs * num_ranks) == 0:
                    yield Form("S", cut[0], runs)


def _equal(parts: Sequence[Tensor], form: Form, entire: Tensor) -> bool:
    if not entire.numel() or (form.kind == "P" and not is_inexact(entire.dtype)):
        return False
    if form.is_entire and not all(torch.equal(part, parts[0]) for part in parts):
        return False
    made = joined(parts, form)
    if not is_inexact(entire.dtype):
        return torch.equal(made, entire)
    single = torch.complex64 if entire.is_complex() else torch.float32
    rounds = entire.dtype != in_double(entire.dtype) or torch.equal(entire.to(single).to(entire.dtype), entire)
    tolerance = 1e-5 if rounds else 1e-11
    return torch.allclose(made, entire, rtol=tolerance, atol=tolerance * max(scale_of(entire), 1e-3), equal_nan=True)


def scale_of(entire: Tensor) -> float:
    """Return the largest entry, without those that stand for infinity in masks: next to them every difference is small."""
    if (of_all := largest(entire)) < MASKED:
        return of_all
    entries = entire.detach().abs()
    return largest(entries[torch.isfinite(entries) & (entries < MASKED)])


def largest(values: Tensor) -> float:
    """Return the largest entry by its absolute value; infinity where one is NaN."""
    if not values.numel():
        return 0.0
    values = values.detach()
    low, high = torch.aminmax(values.abs() if values.is_complex() else values)
    entry = max(-float(low), float(high))
    return math.inf if math.isnan(entry) else entry


def _combinations(ins: Sequence[Sample], num_ranks: int) -> Iterator[tuple[Form, ...]]:
    """Yield the forms to try: cuts of one kind of runs at a time, summands of numbers, at least one input not whole."""
    for runs in RUNS:
        choices = []
        for sample in ins:
            cuts = [Form("S", dim, runs) for dim, size in enumerate(sample.shape)
                    if is_cut(size, Form("S", dim, runs), num_ranks)]  # fmt: skip
            summand = [SUMMAND] if runs == 1 and is_inexact(sample.dtype) else []
            choices.append([ENTIRE, *cuts, *summand])
        tried = itertools.product(*choices) if len(ins) <= MAX_FREE_INPUTS else iter(_alike(choices))
        for forms in tried:
            if any(not form.is_entire for form in forms) and (runs == 1 or any(form.runs == runs for form in forms)):
                yield forms


def _alike(choices: Sequence[Sequence[Form]]) -> list[tuple[Form, ...]]:
    every = [form for form in dict.fromkeys(form for forms in choices for form in forms) if not form.is_entire]
    together: list[tuple[Form, ...]] = [
        tuple(form for _ in choices) for form in every if all(form in forms for forms in choices)
    ]
    together += [tuple(form if form in forms else ENTIRE for forms in choices) for form in every]
    for idx, forms in enumerate(choices):
        together += [
            tuple(form if other == idx else ENTIRE for other in range(len(choices)))
            for form in forms
            if not form.is_entire
        ]
    return list(dict.fromkeys(together))
