"""A model outside the catalogue as a ModelSpec: its repeated blocks are run on fake tensors and counted.

Weights are never read and never materialised: parameters and activations are torch's fake tensors, so that a model on the meta
device is traced like any other. One sequence (the first dimension of the inputs is the batch) goes through each distinct kind of
block forward and backward. Counted are the products and fused attentions of the forward pass, the elements that all other kernels
read and write in both passes, and what autograd keeps, by storage and without parameters. What lies before and after the blocks is
counted in one forward pass of the entire model; its backward kernels are taken to move twice what its forward ones do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from ..schema.errors import ConfigError
from ..schema.layers import (
    Block,
    DenseMLP,
    Embedding,
    Head,
    LayerRun,
    SoftmaxAttention,
)  # fmt: skip
from ..schema.model import ModelSpec
from ..schema.traced import CodeFacts, Traced, TracedSplit
from ..schema.units import counted
from .module.counts import Counts, tensors_in
from .module.fakes import batch_norms, know, of_one_sample, on_fakes
from .module.split_rules import Rule
from .module.splits import Splits, storage_key
from .module.stages import described_sample, why_not_cut
from .module.structure import Structure, find_structure
from .module.trials import cause, failure, split_facts, why_not_sharded, why_not_traced
from .placements.work import placed_units

_STAND_INS = {
    "attention": SoftmaxAttention(kind="mha", num_heads=1, num_kv_heads=1, head_dim=1, rope_fraction=0),
    "mlp": DenseMLP(ffn_dim=1),
}

NOT_FLAT = "stages get tensors by position or by name, each with the samples first, and the sample has other things"


def profile_module(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    name: str | None = None,
    blocks: str | None = None,
    tp: Sequence[int] = (),
) -> ModelSpec:
    """Return the ModelSpec of a module with repeated blocks; `plan` cuts it by data, stages and recompute, not by tp, cp or ep.

    Args:
        model: on any device, also ``meta``.
        example_inputs: positional or keyword arguments of one call, tensors with the batch as their first dimension; tensors on the
            meta device do.
        blocks: name of the container (ModuleList, Sequential, ModuleDict) whose children are the blocks; found where unset, and
            empty for a model that is one block.
        tp: degrees of tensor parallelism for which operators are placed where the code does not say how its layers are split
            (2, 4 and 8, say; docs/models.md). The model is then run on samples like the given ones, in fp32 and with values.

    Raises:
        ConfigError: the inputs do not reach the blocks, or what these make has no gradient.
    """
    if why := why_not_traced(model):
        raise ConfigError(f"{type(model).__name__}: {why}")
    container = _largest_container(model) if blocks is None else blocks
    structure = find_structure(model, container)
    facts = split_facts(model, structure)
    tracer = _Tracer(model, container, facts.rules)
    owners = Counter(key for block in tracer.blocks for key in set(map(id, block.parameters())))
    if shared := [path for path, p in model.named_parameters() if owners[id(p)] > 1]:
        raise ConfigError(
            f"{shared[0]} and {len(shared) - 1} more parameters of {type(model).__name__} are shared by several of its blocks: "
            "each would be counted, sharded and reduced as if it were its own",
        )
    try:
        tracer.run(example_inputs)
        kinds = [tracer.traced_block(block) for block in tracer.blocks]
    except ConfigError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"{type(model).__name__} computes by values that depend on its weights ({error.func}): it is traced without",
            help="let it compute the same whatever the values, with masks for instance",
        ) from None
    except Exception as error:  # the module's own code
        raise ConfigError(
            f"{type(model).__name__} does not run on the sample batch: {failure(model, error)}",
            help="it is traced with the first sample of the batch: call it with that one in Python",
        ) from None
    before, after = tracer.outside()
    # Parameters that both ends use (tied embeddings) are counted in the first.
    vocab_size = tracer.vocab_size(structure)
    is_tied = structure.is_tied and vocab_size > 1
    first, last = (
        Embedding(vocab_size=vocab_size, traced=before),
        Head(vocab_size=vocab_size, traced=after, tied=is_tied),
    )
    runs = (
        LayerRun(layer=Block(traced=traced, **_STAND_INS), count=len(list(same))) for traced, same in groupby(kinds)
    )
    sample = described_sample(example_inputs)
    works, unplaced = placed_units(model, example_inputs, tp) if facts.not_split else ((), ())
    return ModelSpec(
        name=name or type(model).__name__,
        architecture=type(model).__name__,
        hidden_dim=tracer.width,
        layers=(LayerRun(layer=first), *runs, LayerRun(layer=last)),
        tie_embeddings=is_tied,
        max_seq_len=tracer.seq_len,
        code=CodeFacts(
            class_name=type(model).__name__,
            blocks=container,
            not_split=facts.not_split,
            not_along_sequence=facts.not_along_sequence,
            split_widths=facts.widths,
            sample=sample,
            arguments=tuple(example_inputs) if isinstance(example_inputs, Mapping) else ("",) * len(example_inputs),
            not_staged=why_not_cut(model, structure, example_inputs) if sample else NOT_FLAT,
            not_sharded=why_not_sharded(model, tracer.read_outside),
            min_samples=tracer.min_samples,
            coupling=_coupling(model),
            works=works,
            unplaced=unplaced,
        ),
        source=f"traced from {type(model).__module__}.{type(model).__qualname__}, blocks {container}",
    )


def _largest_container(model: nn.Module) -> str:
    """Return the name of the container with the most parameters in two or more children of one class; of nested ones the outer.

    Empty where there is none: the model is then one block. A ModuleList may hold several classes (blocks of attention, blocks of
    recurrence), each twice on average.
    """
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name
        and isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        and len(children := list(module.children())) > 1
        and len({type(child) for child in children}) <= (len(children) // 2 if isinstance(module, nn.ModuleList) else 1)
    }
    best = max(sizes, key=sizes.__getitem__, default="")
    return best if best and sizes[best] else ""


class _Tracer:
    """Runs a model and its blocks on fake tensors.

    Attributes:
        min_samples: that a micro-batch must have.
        blocks: the children of the container; width, seq_len: of the hidden states [1, seq_len, width] that they read.
    """

    def __init__(self, model: nn.Module, container: str, rules: Mapping[str, Rule]) -> None:
        try:
            self.blocks = list(model.get_submodule(container).children()) if container else [model]
        except AttributeError:
            raise ConfigError(f"{type(model).__name__} has no module {container!r}") from None
        if not self.blocks:
            raise ConfigError(f"{container} of {type(model).__name__} has no children")
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls: dict[nn.Module, tuple[Any, Any]] = {}
        self.min_samples = 1
        self._saved_bytes: dict[nn.Module | None, int] = dict.fromkeys([*self.blocks, None], 0)
        self._counted: dict[Any, Traced] = {}
        self._element_bytes = next((t.element_size() for t in model.parameters()), 4)
        known = {t: t.detach().clone() for t in model.buffers()}  # code may write into them
        with self._mode:
            fakes = {t: know(_fake(t), value) for t, value in known.items()}
            fakes |= {t: _fake(t).requires_grad_(t.dtype.is_floating_point) for t in model.parameters()}
        self._fakes = fakes
        in_blocks = {storage_key(fakes[p]): self._names[block] for block in self.blocks for p in block.parameters()}
        parameters = {
            storage_key(fakes[p]): name for name, p in model.named_parameters() if storage_key(fakes[p]) in in_blocks
        }
        self._rules = rules
        by_weight = {
            storage_key(fakes[model.get_submodule(path).weight]): rule
            for path, rule in rules.items()
            if rule != "heads_norm"
        }
        self._splits = Splits(by_weight)
        self._before, self._after = Counts(watched=parameters), Counts(watched=parameters, splits=self._splits)

    def run(self, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        """Run one sequence through the entire model: what blocks are called with and keep, what runs before the first and after."""
        inside: list[nn.Module] = []
        saved: dict[int, tuple[Any, nn.Module | None]] = {}
        persistent = {storage_key(t) for t in self._fakes.values()}
        values = [
            given[:1] if isinstance(given, Tensor) and given.ndim else given for given in tree_leaves(example_inputs)
        ]

        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            counting.close()
            self._calls[block] = args, kwargs
            inside.append(block)

        def leave(*_: Any) -> None:
            inside.pop()
            if not inside:
                counting.enter_context(self._after)

        def save(tensor: Tensor) -> tuple[Tensor, int]:
            if storage_key(tensor) not in persistent:  # the block that keeps it first has it
                saved.setdefault(storage_key(tensor), (tensor.untyped_storage(), inside[0] if inside else None))
            return tensor, tensor._version

        with ExitStack() as hooks, self._traces(), ExitStack() as counting:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(leave))
            counting.enter_context(self._before)
            inputs = tree_map(_one_sequence, example_inputs)
            for fake, value in zip(tree_leaves(inputs), values, strict=True):
                if isinstance(value, Tensor):
                    know(fake, value)
            args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
            with saved_tensors_hooks(save, _unpacked):
                output = self._call(self._model, args, kwargs)
            # What several blocks are called with, as a table of angles, is the model's.
            read_by = Counter(
                key for call in self._calls.values() for key in {storage_key(t) for t in tensors_in(call)}
            )
            for key, (storage, keeper) in saved.items():
                self._saved_bytes[None if read_by[key] > 1 else keeper] += storage.nbytes()
            self._outputs = next((t.shape[-1] for t in tensors_in(output) if t.ndim == 3), 0)
            counting.close()
            self._require_calls()
            self.seq_len, self.width = _tokens_and_width(_hidden(self._calls[self.blocks[0]]))
        with on_fakes(self._model, self._mode):
            self._require_backward(output)

    def _require_calls(self) -> None:
        if len(self._calls) < len(self.blocks):
            missing = len(self.blocks) - len(self._calls)
            raise ConfigError(
                f"{missing} of {len(self.blocks)} blocks ({self._names[self.blocks[0]]}, ...) are not called with these inputs",
                help="give inputs that reach them, or name other blocks: profile_module(..., blocks='encoder.layers')",
            )

    @contextmanager
    def _traces(self) -> Iterator[None]:
        with of_one_sample(self._model) as norms, on_fakes(self._model, self._mode):
            yield
        self.min_samples = 2 if norms else self.min_samples

    def _require_backward(self, output: Any) -> None:
        """Run the backward pass of a call, for what its code may raise there."""
        ends = [
            t for t in (*tensors_in(output), *tensors_in(list(map(_fields, tree_leaves(output))))) if t.requires_grad
        ]
        name = type(self._model).__name__
        if not ends:
            raise ConfigError(
                f"{name} puts out nothing that has a gradient, but {described(output)}: it cannot be trained",
                help="return what the loss is computed from, and neither detach it nor compute it under no_grad",
            )
        try:
            torch.autograd.backward(ends, list(map(torch.ones_like, ends)))
        except Exception as error:  # the module's own code
            raise ConfigError(f"the backward pass of {name} fails on the sample batch: {cause(error)}") from None
        for tensor in self._fakes.values():
            tensor.grad = None

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Each place of a tensor by one name: of one that has two the swap back would leave the fake there.
        state = {
            f"{path}.{name}" if path else name: self._fakes[tensor]
            for path, part in module.named_modules()
            for name, tensor in (*part.named_parameters(recurse=False, remove_duplicate=False),
                                 *part.named_buffers(recurse=False, remove_duplicate=False))
        }  # fmt: skip
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    def traced_block(self, block: nn.Module) -> Traced:
        """Count one block; blocks of one class, equal parameters and equal inputs are counted once."""
        shapes = tuple(tuple(t.shape) for t in tensors_in(self._calls[block]))
        layout = tuple((name, tuple(t.shape)) for name, t in block.named_parameters())
        key = (type(block), layout, shapes, str(block), self._saved_bytes[block])
        if key not in self._counted:
            self._counted[key] = self._count(block)
        return self._counted[key]

    def _count(self, block: nn.Module) -> Traced:
        saved: dict[int, Any] = {}

        def save(tensor: Tensor) -> Tensor:
            saved[storage_key(tensor)] = tensor.untyped_storage()
            return tensor

        splits = Splits(self._splits.rules)
        forward, backward = Counts(splits=splits), Counts(splits=splits, backward=True)
        with self._traces():
            args, kwargs = tree_map(_leaf, self._calls[block])
            input_bytes = _hidden((args, kwargs)).untyped_storage().nbytes()
            with saved_tensors_hooks(save, lambda t: t), forward:
                output = self._call(block, args, kwargs)
            result = next((t for t in tensors_in(output) if t.requires_grad), None)
            if result is None:
                raise ConfigError(f"{self._names[block]} puts out nothing that has a gradient")
            gradient = torch.ones_like(result)
            try:
                with backward:
                    result.backward(gradient)
            except Exception as error:  # the module's own code
                where = " ".join(filter(None, (self._names[block], f"({type(block).__name__})")))
                raise ConfigError(f"the backward pass of {where} fails on the sample batch: {cause(error)}") from None
        product_bytes = sum(storage.nbytes() for key, storage in forward.saved_outputs.items() if key in saved)
        size = self._element_bytes
        return forward.traced(
            self.seq_len, _num_elements(block.parameters()), size,
            backward_elements=round(backward.traffic_bytes / size), backward_kernels=backward.kernels,
            saved_elements=math.ceil(self._saved_bytes[block] / size),
            selective_elements=round((product_bytes + input_bytes) / size), full_elements=round(input_bytes / size),
            split=self._split(block, forward, backward, saved),
        )  # fmt: skip

    def _split(
        self, block: nn.Module, forward: Counts, backward: Counts, saved: Mapping[int, Any]
    ) -> TracedSplit | None:
        """Return what tp divides of a block; ``saved`` are the storages that autograd keeps."""
        if not self._rules:
            return None
        splits, size = forward.splits, self._element_bytes
        weights = {storage_key(tensor) for tensor in self._fakes.values()}
        saved_bytes = {key: storage.nbytes() for key, storage in saved.items() if key not in weights}
        of_split = sum(nbytes for key, nbytes in saved_bytes.items() if key in splits.split)
        of_read = sum(nbytes for key, nbytes in saved_bytes.items() if key in splits.read and key not in splits.split)
        total, start = self._saved_bytes[block], f"{self._names[block]}."
        inside = [rule for path, rule in self._rules.items() if path.startswith(start)]
        return TracedSplit(
            num_params=self._split_params(start),
            forward_elements=round(forward.split_bytes / size),
            backward_elements=round(backward.split_bytes / size),
            saved_elements=round(min(of_split, total) / size),
            selective_elements=round(
                sum(saved_bytes[key] for key in forward.saved_outputs if key in saved_bytes and key in splits.split)
                / size
            ),
            gathered_elements=round(min(of_read, max(0, total - of_split)) / size),
            num_sums=sum(rule in ("by_input", "by_slice") for rule in inside),
        )

    def _is_inside(self, path: str) -> bool:
        return any(path.startswith(f"{self._names[block]}.") for block in self.blocks)

    def _split_params(self, start: str) -> int:
        rows = {f"{path}.bias" for path, rule in self._rules.items() if rule in ("by_output", "gathered")}
        names = {f"{path}.weight" for path, rule in self._rules.items() if rule != "heads_norm"} | rows
        inside = {id(p): p for name, p in self._model.named_parameters() if name in names and name.startswith(start)}
        return _num_elements(inside.values())

    @property
    def read_outside(self) -> list[str]:
        """Parameters of blocks that are read outside of their forward passes."""
        return self._before.read + self._after.read

    def vocab_size(self, structure: Structure) -> int:
        """Return the width of the output where it is that of the token embedding, of a language model; else 1, a stand-in."""
        weight = (
            None
            if structure.embedding is None
            else getattr(self._model.get_submodule(structure.embedding), "weight", None)
        )
        is_language = weight is not None and tuple(weight.shape) == (self._outputs, self.width)
        return self._outputs if is_language else 1

    def outside(self) -> tuple[Traced, Traced]:
        """Count what lies before and after the blocks; parameters go where they are used first, the others to the end."""
        in_blocks = {p for block in self.blocks for p in block.parameters()}
        others = {p for p in self._model.parameters() if p not in in_blocks}
        first = {p for m in self._model.modules() if isinstance(m, nn.Embedding | nn.Conv2d) for p in m.parameters()}
        saved = math.ceil(self._saved_bytes[None] / self._element_bytes)
        outer = [path for path, rule in self._rules.items() if rule == "gathered" and not self._is_inside(path)]
        head = TracedSplit(num_params=sum(self._split_params(f"{path}.") for path in outer)) if outer else None
        before, after = (
            counts.traced(
                self.seq_len, _num_elements(parameters), self._element_bytes,
                backward_elements=round(2 * counts.traffic_bytes / self._element_bytes),
                backward_kernels=2 * counts.kernels, saved_elements=saved_elements, split=split,
            )
            for counts, parameters, saved_elements, split in (
                (self._before, others & first, 0, None), (self._after, others - first, saved, head),
            )
        )  # fmt: skip
        return before, after


def _coupling(model: nn.Module) -> str:
    """Return what couples the samples of a batch."""
    norms = batch_norms(model)
    return (
        f"{next(iter(norms))}, of {counted(len(norms), 'batch norm')}, takes the statistics of each micro-batch"
        if norms
        else ""
    )


def _unpacked(saved: tuple[Tensor, int]) -> Tensor:
    """Return a tensor that autograd saved; with hooks it leaves it to them to see what was written into since."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(f"{list(tensor.shape)}, which the backward pass reads, was changed by an operation in place")
    return tensor


def _fields(value: Any) -> Any:
    """Return what is in an object that torch's pytree does not know."""
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, Tensor) else ()


def described(output: Any) -> str:
    """Return what a module puts out, in short."""
    kinds = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in tensors_in(output)]
    return ", ".join(kinds[:3]) or type(output).__name__


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _hidden(call: tuple[Any, Any]) -> Tensor:
    """Return what a block works on: hidden states [batch, tokens, width], else the first tensor with numbers, else any."""
    tensors = tensors_in(call)
    numbers = [t for t in tensors if t.is_floating_point() and t.ndim > 1]
    of_tokens = [t for t in numbers if t.ndim == 3]
    chosen = next(iter((*of_tokens, *numbers, *tensors)), None)
    if chosen is None:
        raise ConfigError("a block reads no tensor, of which one dimension would be the batch")
    return chosen


def _tokens_and_width(hidden: Tensor) -> tuple[int, int]:
    """Return the places of a sample and the width of each: [1, S, D]; of images [1, C, H, W], rows [1, D], indices [1, S]."""
    if hidden.ndim > 3:
        return math.prod(hidden.shape[2:]), hidden.shape[1]
    if hidden.ndim == 3:
        return hidden.shape[1], hidden.shape[2]
    last = hidden.shape[-1] if hidden.ndim == 2 else 1
    return (1, last) if hidden.is_floating_point() else (last, 1)


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _one_sequence(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = (1, *value.shape[1:]) if value.ndim else value.shape
    return torch.zeros(shape, dtype=value.dtype, device="cpu")


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() and value.ndim > 1)
