"""What a row leaves to its notes and to arithmetic: degrees and batches, and the plan of a tuner, stage by stage.

Plans are those of Mist and Aceso (the notes of a row), and of Sailor (layers_per_stage).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from .rows import RunRow, stated

TOKENS_PER_PASS = 8192
"""Where nothing says how a rank's sequences are split into passes, a fully sharded rank takes as many as have this many tokens."""


def completed_degrees(row: RunRow) -> tuple[RunRow, tuple[str, ...]] | str:
    """Fill in tp, pp, dp and micro_batch from what a row states, or as its framework would take them.

    Returns:
        The row and which of them were assumed; or why they stay open.
    """
    row, noted = _with_noted_sizes(row)
    if row.n_gpus is None and row.dp and row.tp and row.pp:
        row = replace(row, n_gpus=row.dp * row.tp * row.pp * (row.cp or 1))
    num_devices = row.n_gpus
    if num_devices is None:
        return row, ()  # the cluster cannot be built either
    row = _with_tuned_strategy(row)
    degrees: dict[str, Any] = {name: getattr(row, name) or 0 for name in ("tp", "pp", "dp")}
    missing = [name for name in degrees if getattr(row, name) is None]
    # Of a run that shards everything nothing else is cut, or it would say so.
    is_sharded = row.sharding_class in ("zero3", "hybrid")
    if len(missing) == 3 and num_devices > 1 and not is_sharded:
        return "mapping: tp, pp and dp not stated"
    assumed = list(noted)
    if missing:
        known = (row.cp or 1) * max(degrees["tp"], 1) * max(degrees["pp"], 1) * max(degrees["dp"], 1)
        quotient, remainder = divmod(num_devices, known)
        if remainder:
            return "layout: degrees do not multiply to the number of devices"
        # The last open one takes what remains: data parallelism where that is open, else tensor parallelism.
        last = missing[0] if len(missing) == 1 else "dp" if "dp" in missing else "tp"
        degrees |= {name: quotient if name == last else 1 for name in missing}
        assumed += [f"{name}=1" for name in missing if name != last]
    filled = replace(row, **degrees)
    if filled.global_batch is None and filled.micro_batch and filled.grad_accum:
        filled = replace(filled, global_batch=filled.micro_batch * filled.grad_accum * (filled.dp or 1))
    if filled.micro_batch is None:
        filled = replace(filled, micro_batch=_micro_batch(filled))
        assumed.append("micro_batch" if filled.grad_accum else f"micro_batch={filled.micro_batch}")
    return filled, tuple(assumed)


def _with_noted_sizes(row: RunRow) -> tuple[RunRow, list[str]]:
    """Fill in the sequence length and the batches that only the notes of a row have; return it and which these are."""
    columns = (("seq_len", "sequence"), ("global_batch", "global batch"), ("micro_batch", "micro batch"))
    noted: dict[str, Any] = {
        name: int(size)
        for name, choice in columns
        if getattr(row, name) is None and (size := stated(choice, row.notes)) and int(size) > 0
    }
    return replace(row, **noted), [f"{name}={size} (notes)" for name, size in noted.items()]


def _micro_batch(row: RunRow) -> int:
    """Return global / (dp * accumulation) where stated; one sequence for Megatron's engines; for FSDP, TOKENS_PER_PASS."""
    share = (row.global_batch or 0) // (row.dp or 1)
    if share < 1:
        return 1
    if row.grad_accum:
        return max(share // row.grad_accum, 1)
    if row.sharding_class not in ("zero3", "hybrid") or (row.pp or 1) > 1 or row.framework.startswith("Megatron"):
        return 1
    upper = max(TOKENS_PER_PASS // (row.seq_len or TOKENS_PER_PASS), 1)
    return max(size for size in range(1, min(share, upper) + 1) if share % size == 0)


class TunedStage(NamedTuple):
    """A stage of a plan of Mist, ``- - 1 - 2 - 1 - 0 - 0 - 1 - 0.0 ...``: what is sharded, and fractions on the host."""

    micro_batch: float
    dp: float
    tp: float
    shards_parameters: float
    shards_gradients: float
    shards_states: float
    parameters: float
    gradients: float
    states: float
    activations: float


def tuned_stages(row: RunRow) -> list[TunedStage]:
    """Return the stages of the plan of Mist in a row's notes."""
    stages = re.findall(r"- (- \d+ - \d+ - \d+ - \d - \d - \d(?: - \d\.\d+){4})", row.notes)
    return [TunedStage(*map(float, stage[2:].split(" - "))) for stage in stages]


def _with_tuned_strategy(row: RunRow) -> RunRow:
    """Fill in micro-batch, dp, tp and sharding from a plan of Mist whose stages are all alike in them."""
    stages = {stage[:6] for stage in tuned_stages(row)}
    if len(stages) != 1:
        return row
    micro, dp, tp, parameters, gradients, states = map(int, stages.pop())
    if row.n_gpus != dp * tp * (row.pp or 1) * (row.cp or 1):
        return row
    sharding = "zero3" if parameters else "zero2" if gradients else "zero1" if states else "none"
    filled = replace(row, micro_batch=row.micro_batch or micro, dp=row.dp or dp, tp=row.tp or tp)
    return replace(filled, sharding_class=sharding) if row.sharding_class in ("", "unknown") else filled


def stage_fractions(row: RunRow) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return, by stage where the row says it, the fraction of its blocks that recompute and of its optimizer states on the host."""
    recomputed = listed_fractions(row.recompute)
    blocks, counts = (noted_numbers(name, row.notes) for name in ("layer_partitions", "gradient_checkpointing"))
    if blocks and len(blocks) == len(counts):
        recomputed = tuple(min(count / max(n, 1), 1.0) for n, count in zip(blocks, counts, strict=True))
    return recomputed, tuple(stage.states for stage in tuned_stages(row))


def stage_cuts(row: RunRow) -> tuple[int, ...]:
    """Return where a row's stages begin and end, in layers with embedding and head, as far as the row says it.

    Mist lists blocks (layer_partitions), Sailor layers with embedding and head (layers_per_stage).
    """
    layers = noted_numbers("layer_partitions", row.notes)
    if layers:
        layers[0] += 1
        layers[-1] += 1
    elif listed := re.search(r"layers_per_stage=\[([\d, ]+)\]", row.notes):
        layers = [int(number) for number in re.findall(r"\d+", listed[1])]
    is_complete = row.layers and len(layers) == (row.pp or 1) and sum(layers) == row.layers + 2
    return tuple(accumulate(layers, initial=0)) if is_complete else ()


def stages_differ_in_devices(row: RunRow) -> bool:
    """Return whether the stages of a row have different numbers of devices."""
    match = re.search(r"stage gpus=\[([\d, ]+)\]", row.notes)
    return match is not None and len(set(match[1].replace(" ", "").split(","))) > 1


def listed_fractions(text: str) -> tuple[float, ...]:
    """Return the numbers of ``[0.5, 0.25]``, at most 1 each; none where there is no such list."""
    match = re.search(r"\[([\d\s.,]+)\]", text)
    numbers = re.split(r"[\s,]+", match[1].strip(" ,\t")) if match else []
    if not all(re.fullmatch(r"\d+(?:\.\d+)?", number) for number in numbers):
        return ()
    return tuple(min(float(number), 1.0) for number in numbers)


def noted_numbers(name: str, notes: str) -> list[int]:
    """Return the numbers of ``name: - 4 - 8`` in the notes."""
    match = re.search(name + r":((?: - \d+)+)", notes)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []
