"""Modules of random operators: a list of steps, each of which reads values that steps before it made."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import zoo
from harness import Case, Outcome
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.profilers.placements.export import UnitGraph, Value
from meshwright.profilers.placements.gate import Unsplit, Wrong, parsed, why_wrong
from meshwright.profilers.placements.parts import is_cut
from meshwright.profilers.placements.shrink import shrunk
from meshwright.profilers.placements.signatures import RUNS, Signature
from meshwright.profilers.placements.work import rows_of, trace_units, uncut_samples, unit_work
from meshwright.runtime import parallelize
from meshwright.runtime.models.layers import full_tensor
from meshwright.schema import ConfigError
from meshwright.schema.placement_forms import ENTIRE, REPEATED, Form
from meshwright.schema.placements import UnitPlacement, UnitWork, WholeUnit
from plans import cpu_cluster
from torch import Tensor, nn
from zoo_plans import workload_of

BATCH, LENGTH, WIDTH = 4, 8, 24
WIDTHS = (8, 12, 24, 48)
MAX_STEPS = 8


class Step(NamedTuple):
    """An operator, which two values it may read, counted from the first, and which of its kinds it is."""

    op: str
    a: int
    b: int
    kind: int


def _linear(kind: int, a: Sequence[int], b: Sequence[int]) -> nn.Module:
    return nn.Linear(a[-1], WIDTHS[kind], bias=kind % 2 == 0)


def _norm(kind: int, a: Sequence[int], b: Sequence[int]) -> nn.Module:
    return nn.GroupNorm(math.gcd(4, a[0]), a[0]) if kind > 1 else (nn.LayerNorm, nn.RMSNorm)[kind](a[-1])


def _conv(kind: int, a: Sequence[int], b: Sequence[int]) -> nn.Module:
    return nn.Conv1d(a[0], 8, (1, 3, 3, 5)[kind], padding=(0, 1, 1, 2)[kind], groups=math.gcd((1, 1, 4, 8)[kind], a[0]))


def _attention(kind: int, a: Sequence[int], b: Sequence[int]) -> nn.Module:
    return nn.Linear(a[-1], 3 * 16)


def attend(layer: nn.Module, x: Tensor, other: Tensor, kind: int) -> Tensor:
    """Attention of four heads, of one product."""
    q, k, v = layer(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=kind % 2 == 1).transpose(1, 2).flatten(2)


def split(x: Tensor, kind: int) -> Tensor:
    """Two or three parts, along tokens or channels, put together again otherwise."""
    dim, parts = (1, 2)[kind % 2], 2 if kind < 2 else 4
    first, *others = x.chunk(parts, dim) if x.shape[dim] > 1 else (x, x)
    return first * others[-1].tanh() if kind != 2 else torch.cat([others[-1], first], dim)


def put(x: Tensor, kind: int) -> Tensor:
    """Writes in place into a copy."""
    x = x.clone()
    if kind < 2:
        x[:, 0] = x[:, 1] * 2
    else:
        x[..., : x.shape[-1] // 2] += 1.0
    return x


def joined(x: Tensor, y: Tensor) -> Tensor:
    """Two values along the dimension in which they may differ."""
    return (
        torch.cat([x, y], -1) if x.shape[1] == y.shape[1] else torch.cat([x, y], 1) if x.shape[2] == y.shape[2] else x
    )


def with_residual(x: Tensor, y: Tensor) -> Tensor:
    """A sum of values of one shape."""
    return x + y if x.shape == y.shape else x + x.sigmoid()


LAYERS: dict[str, Callable[[int, Sequence[int], Sequence[int]], nn.Module]] = {
    "linear": _linear, "norm": _norm, "conv": _conv, "attention": _attention,
}  # fmt: skip
# Reductions leave a row out: those of normalised rows are constants, whose gradients vanish.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "softmax": (lambda x: (3 * x).softmax(1), lambda x: (3 * x).softmax(2)),
    "index": (
        lambda x: x[:, torch.arange(x.shape[1]).roll(1)], lambda x: x.flip(2),
        lambda x: x.index_select(2, torch.arange(0, x.shape[2], 2)), lambda x: x[:, ::2],
    ),
    "activation": (F.gelu, F.relu, F.silu, torch.tanh),
    "reduce": (
        lambda x: x * x[..., 1:].mean(2, True).tanh(), lambda x: x * x.amax(1, True).tanh(), lambda x: x * x.std(1, keepdim=True),
        lambda x: x * x[:, 1:, 1:].sum((1, 2), True).tanh(),
    ),
    "shape": (
        lambda x: x.unflatten(2, (math.gcd(4, x.shape[2]), -1)).transpose(2, 3).flatten(2), lambda x: x.mT.reshape(x.shape),
        lambda x: x.repeat(1, 1, 2), lambda x: x.unflatten(1, (math.gcd(2, x.shape[1]), -1)).mean(1),
    ),
}  # fmt: skip
PLAIN: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "split": lambda x, y, kind: split(x, kind),
    "cat": lambda x, y, kind: joined(x, y),
    "residual": lambda x, y, kind: with_residual(x, y),
    "product": lambda x, y, kind: (x @ y.mT).softmax(-1) @ y if x.shape[2] == y.shape[2] else x,
    "write": lambda x, y, kind: put(x, kind),
}
OPS = (*LAYERS, *KINDS, *PLAIN)


class RandomBlock(nn.Module):
    """Steps one after the other; what comes out is as wide and long as what comes in."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = [Step(*step) for step in steps]
        self.layers = nn.ModuleList()
        with torch.no_grad():
            values = [torch.zeros(BATCH, LENGTH, WIDTH)]
            for step in self.steps:
                a, b = (values[idx % len(values)] for idx in (step.a, step.b))
                layer = LAYERS[step.op](step.kind, a.shape[1:], b.shape[1:]) if step.op in LAYERS else nn.Identity()
                self.layers.append(layer)
                made = self._made(step, layer, a, b)
                values.append(made if made.numel() <= 8 * BATCH * LENGTH * WIDTH else a)
            self.num_values = len(values)
        self.out = nn.Linear(values[-1].shape[-1], WIDTH)

    def _made(self, step: Step, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        if step.op == "attention":
            return attend(layer, a, b, step.kind)
        if step.op in KINDS:
            return KINDS[step.op][step.kind % len(KINDS[step.op])](a)
        if step.op in PLAIN:
            return PLAIN[step.op](a, b, step.kind)
        return layer(a)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, layer in zip(self.steps, self.layers, strict=True):
            a, b = (values[idx % len(values)] for idx in (step.a, step.b))
            made = self._made(step, layer, a, b)
            values.append(made if made.numel() <= 8 * len(x) * LENGTH * WIDTH else a)
        # Every value counts, and none grows from block to block: of activations that are all 1 nothing could be seen.
        others = sum(v.abs().mean((1, 2), True) for v in values[1:-1])
        return F.layer_norm(x + self.out(values[-1]).mean(1, keepdim=True) * (1 + others), (WIDTH,))


class RandomModule(nn.Module):
    """A block of random steps, twice."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([RandomBlock(steps) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def steps_of(seed: int) -> list[Step]:
    """Return random steps; most read what was made last."""
    chance = random.Random(seed)
    count = chance.randint(2, MAX_STEPS)
    return [
        Step(
            chance.choice(OPS),
            idx if chance.random() < 0.7 else chance.randrange(8),
            chance.randrange(8),
            chance.randrange(4),
        )
        for idx in range(count)
    ]


def build(steps: Sequence[Step]) -> tuple[nn.Module, Tensor]:
    """Return a module with the same weights on every rank, and its input."""
    torch.manual_seed(0)
    module = RandomModule(steps)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.7, (len(parameter) / parameter.numel()) ** 0.5 / 2)
    return module, torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def random_placement(work: UnitWork, chance: random.Random) -> UnitPlacement:
    """Return a placement of signatures that were proved, whatever they cost."""
    chosen = {op.name: chance.choice(op.signatures) for op in work.operators}
    operators = [op for op in work.operators if op.op not in ("parameter", "given")]
    return UnitPlacement(
        paths=work.paths, num_ranks=work.num_ranks, described=work.described, trained_inputs=work.trained_inputs,
        signatures=tuple(chosen[op.name] for op in operators),
        parameters=tuple((path, chosen[name][1:]) for name, path in work.parameters), num_params=0, local_params=0,
    )  # fmt: skip


def cases_of(seed: int) -> list[Case]:
    """Return the plan of a random module with tp 2, and the same with signatures at random."""
    steps, chance = steps_of(seed), random.Random(seed)
    module, x = build(steps)
    spec = profile_module(module, [x], tp=(2,))
    best = plan(spec, cpu_cluster(2), workload_of(spec), fixed={"tp": 2, "sequence_parallel": False})
    assert spec.code is not None
    placements = tuple(random_placement(work, chance) for work in spec.code.works)
    code = spec.code.replace(placements=placements)
    other = best.model_copy(update={"model": best.model.replace(code=code)})
    return [
        Case(f"{seed}: {name}", found, module=json.dumps(steps), run=one_step)
        for name, found in (("planned", best), ("any", other))
    ]


def one_step(case: Case, folder: Path) -> Outcome:
    """The gradients of one step; the case's module is its steps as JSON."""
    module, x = build(json.loads(case.module))
    model = parallelize(module, case.plan, device=torch.device("cpu"))
    zoo.loss_of(model.module(x).tanh()).backward()  # mean squares of normalised rows are constant
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Outcome(
        gradients={name.removeprefix("module."): full_tensor(grad).clone() for name, grad in gradients.items()}
    )


def alone(steps: Sequence[Step]) -> dict[str, Tensor]:
    """The gradients of the same step on one rank."""
    module, x = build(steps)
    zoo.loss_of(module(x).tanh()).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


class Gated(NamedTuple):
    """A unit as the gate sees it: its graph, what it makes on one rank, and proved signatures of each operator."""

    graph: UnitGraph
    unsplit: Unsplit
    work: UnitWork
    signatures: dict[str, list[Signature]]
    parameters: dict[str, list[Form]]

    def placed(self, chance: random.Random) -> tuple[dict[str, Signature], dict[str, Form]]:
        """Return a proved signature of each operator and a form of each parameter, whatever they cost."""
        return (
            {name: chance.choice(of) for name, of in self.signatures.items()},
            {name: chance.choice(of) for name, of in self.parameters.items()},
        )

    def tells(self, name: str) -> bool:
        """Return whether an operator's values differ enough: of zeros, and of what is repeated, every order is right."""
        graph, values = self.graph, self.unsplit.values
        refs = [graph.value_of(producer) for producer in graph.calls[name].producers]
        floats = [values[ref] for ref in (*refs, Value(name)) if ref in values and values[ref].is_floating_point()]
        bins = [(1e4 * value / max(float(value.abs().max()), 1e-9)).round().unique() for value in floats]
        return all(len(of) > 0.7 * value.numel() or len(of) > 200 for of, value in zip(bins, floats, strict=True))

    def why_wrong(self, placed: dict[str, Signature], parameters: dict[str, Form]) -> Wrong | None:
        """Ask the gate."""
        return why_wrong(self.graph, placed, parameters, self.unsplit, 2, set())


def gated(module: nn.Module, x: Tensor) -> tuple[list[Gated], list[WholeUnit]]:
    """Return the kinds of units of a module for two ranks, and what stays whole."""
    units, whole = trace_units(module, (rows_of(x, uncut_samples((2,))),), {})
    made, cache = list[Gated](), dict[Any, list[Signature]]()
    for unit in units:
        try:
            work = unit_work(unit, 2, {}, cache)
        except ConfigError as error:
            whole += [WholeUnit(path=path, why=error.message) for path in unit.paths]
            continue
        graph, given = shrunk(unit.graph, unit.given, 2)
        signatures = {
            op.name: list(map(parsed, op.signatures)) for op in work.operators if op.op not in ("parameter", "given")
        }
        parameters = {
            op.name: [Form.parse(text[1:]) for text in op.signatures] for op in work.operators if op.op == "parameter"
        }
        made.append(Gated(graph, Unsplit.of(graph, given), work, signatures, parameters))
    return made, whole


def wrong_signatures(unit: Gated, name: str, right: Signature) -> list[Signature]:
    """Return signatures that differ from a right one in one place, so that values or gradients are wrong."""
    refs = [unit.graph.value_of(producer) for producer in unit.graph.calls[name].producers]
    wrong = []
    for idx, form in enumerate(right.outs):
        if form.kind == "P":
            wrong.append(right._replace(outs=_with(right.outs, idx, REPEATED)))
        if form.kind == "S":
            size = unit.graph.shapes[Value(name, idx)][form.dim]
            others = [Form("S", form.dim, runs) for runs in RUNS if runs != form.runs]
            wrong += [right._replace(outs=_with(right.outs, idx, f)) for f in others if is_cut(size, f, 2)]
    if all(form.is_entire for form in (*right.ins, *right.outs)):
        return []
    for idx, form in enumerate(right.ins):
        if form.kind == "R" and refs[idx] in unit.unsplit.trained:
            wrong.append(right._replace(ins=_with(right.ins, idx, ENTIRE)))
        if form.kind == "P":
            wrong.append(right._replace(ins=_with(right.ins, idx, REPEATED)))
        if form.kind == "S":
            wrong.append(right._replace(ins=_with(right.ins, idx, REPEATED)))
    return wrong


def _with(forms: tuple[Form, ...], idx: int, form: Form) -> tuple[Form, ...]:
    return (*forms[:idx], form, *forms[idx + 1 :])


def planted(unit: Gated, chance: random.Random) -> tuple[str, Signature, Wrong | None] | None:
    """Put a wrong signature at a random operator of a right placement; return where, which, and what the gate says."""
    placed, parameters = unit.placed(chance)
    names = [name for name in placed if unit.tells(name) and wrong_signatures(unit, name, placed[name])]
    if not names:
        return None
    name = chance.choice(names)
    wrong = chance.choice(wrong_signatures(unit, name, placed[name]))
    return name, wrong, unit.why_wrong({**placed, name: wrong}, parameters)
