"""A row's layout: degrees, sharding, recompute and offloading, as stated or as its framework does by default."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from ..schema import Layout, ModelSpec
from ..schema.layers import LatentAttention
from ..schema.layout import Offload, Recompute
from .rows import FrameworkDefaults, RunRow
from .workloads import keeps_scores

TOKENS_PER_PASS = 8192
"""Where nothing says how a rank's sequences are split into passes, a fully sharded rank takes as many as have this many tokens."""

DRIVE_BYTES_PER_S = 4.5e9
"""One data-centre NVMe drive reading and writing as much: 6.5 and 3.4 GB/s (Intel P5510 data sheet), harmonic mean."""

_ACESO_CORE = 3 / 13
"""Scores, softmax and dropout of unfused attention among the operators of an Aceso block (its model_ops.py), recomputed first
because they keep most for their seconds."""


def completed_degrees(row: RunRow) -> tuple[RunRow, tuple[str, ...]] | str:
    """Fill in tp, pp, dp and micro_batch from what a row states, or as its framework would take them.

    Returns:
        The row and which of them were assumed; or why they stay open.
    """
    num_devices = row.n_gpus
    if num_devices is None:
        return row, ()  # the cluster cannot be built either
    row = _with_tuned_strategy(row)
    missing = [name for name in ("tp", "pp", "dp") if getattr(row, name) is None]
    if len(missing) == 3 and num_devices > 1:
        return "mapping: tp, pp and dp not stated"
    assumed: list[str] = []
    degrees = {name: getattr(row, name) or 0 for name in ("tp", "pp", "dp")}
    known = (row.cp or 1) * max(degrees["tp"], 1) * max(degrees["pp"], 1) * max(degrees["dp"], 1)
    quotient, remainder = divmod(num_devices, known)
    if remainder and missing:
        return "layout: degrees do not multiply to the number of devices"
    if missing:
        # The last open one takes what remains: data parallelism where that is open, else tensor parallelism.
        last = missing[0] if len(missing) == 1 else "dp" if "dp" in missing else "tp"
        for name in missing:
            degrees[name] = quotient if name == last else 1
            assumed += [f"{name}=1"] if name != last else []
    filled = replace(row, tp=degrees["tp"], pp=degrees["pp"], dp=degrees["dp"])
    if filled.micro_batch is None:
        filled = replace(filled, micro_batch=_micro_batch(filled))
        assumed.append("micro_batch" if filled.grad_accum else f"micro_batch={filled.micro_batch}")
    return filled, tuple(assumed)


def _micro_batch(row: RunRow) -> int:
    """Return global / (dp * accumulation) where stated; one sequence for Megatron's engines; for FSDP, TOKENS_PER_PASS."""
    share = (row.global_batch or 0) // (row.dp or 1)
    if share < 1:
        return 1
    if row.grad_accum:
        return max(share // row.grad_accum, 1)
    if row.sharding_class not in ("zero3", "hybrid") or (row.pp or 1) > 1:
        return 1
    upper = max(TOKENS_PER_PASS // (row.seq_len or TOKENS_PER_PASS), 1)
    return max(size for size in range(1, min(share, upper) + 1) if share % size == 0)


def _with_tuned_strategy(row: RunRow) -> RunRow:
    """Fill in what a plan of Mist whose stages are all alike says in its notes.

    Micro-batch, dp, tp, whether parameters, gradients and states are sharded, and four fractions on the host:
    ``- - 1 - 2 - 1 - 0 - 0 - 1 - 0.0 ...``.
    """
    stages = set(re.findall(r"- - (\d+) - (\d+) - (\d+) - (\d) - (\d) - (\d) - \d\.\d", row.notes))
    if len(stages) != 1:
        return row
    micro, dp, tp, parameters, gradients, states = (int(number) for number in stages.pop())
    if row.n_gpus != dp * tp * (row.pp or 1) * (row.cp or 1):
        return row
    sharding = "zero3" if parameters else "zero2" if gradients else "zero1" if states else "none"
    filled = replace(row, micro_batch=row.micro_batch or micro, dp=row.dp or dp, tp=row.tp or tp)
    return replace(filled, sharding_class=sharding) if row.sharding_class in ("", "unknown") else filled


def layout_of(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> Layout:
    """Return the layout of a row; where stages differ, their mean.

    Raises:
        ConfigError: the degrees contradict one another.
    """
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max((row.n_gpus or 1) // (tp * pp * cp), 1)
    zero_stage = _zero_stage(row, defaults)
    group = _sharding_group(row, dp, cp) if zero_stage else 1
    return Layout(
        dp_replicate=dp // group,
        dp_shard=group,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=row.ep or 1,
        etp=_expert_tp(row, dp * cp * tp, defaults),
        num_model_chunks=num_chunks(row) if pp > 1 else 1,
        micro_batch_size=row.micro_batch or 1,
        zero_stage=zero_stage if group * cp > 1 else 0,
        sequence_parallel=tp > 1 and _sequence_parallel(row, defaults),
        **_recompute_fields(row, model, defaults),
        **_offload_fields(row, zero_stage if group > 1 else 0),
    )


def num_chunks(row: RunRow) -> int:
    """Return the model chunks of a pipeline rank; a named interleaved or zero-bubble schedule counts as two."""
    if re.fullmatch(r"\d+", row.vpp):
        return max(int(row.vpp), 1)
    return 1 if row.vpp.lower().replace("-", "") in ("", "none", "1f1b", "gpipe", "afab") else 2


def _zero_stage(row: RunRow, defaults: FrameworkDefaults) -> Any:
    name = row.sharding_class
    if name == "lora":
        return 0  # every rank has the entire frozen model
    if name not in ("none", "zero1", "zero2", "zero3", "hybrid"):
        name = defaults.assume("sharding")
    if name == "hybrid":
        return 1 if "zero-1" in row.sharding.lower() else 3
    return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[name]


def _sharding_group(row: RunRow, dp: int, cp: int) -> int:
    """Return the data-parallel ranks over which states are sharded: as printed, a node for hybrid sharding, else all.

    A printed size counts the context ranks, which share in the sharding.
    """
    size = dp
    if match := re.search(r"(?:over|group(?: of)?|degree) (\d+)", row.sharding):
        size = max(int(match[1]) // cp, 1)
    elif row.sharding_class == "hybrid":
        size = row.gpus_per_node or 8
    return size if size < dp and dp % size == 0 else dp


def _expert_tp(row: RunRow, stage_ranks: int, defaults: FrameworkDefaults) -> int:
    """Return the ranks that share one expert: as stated, else the framework's choice where the ranks of a stage allow it."""
    ep, tp = row.ep or 1, row.tp or 1
    if row.etp is not None or ep == 1 or tp == 1:
        return row.etp or 1
    return tp if defaults.assume("experts_follow_tp") and stage_ranks % (ep * tp) == 0 else 1


def _sequence_parallel(row: RunRow, defaults: FrameworkDefaults) -> bool:
    if row.seq_parallel in ("yes", "no"):
        return row.seq_parallel == "yes"
    return bool(defaults.assume("sequence_parallel"))


def _recompute_fields(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> dict[str, Any]:
    """Return which recompute, and of which fraction of the blocks."""
    fraction = recompute_fraction(row) if row.recompute_class not in ("none", "unknown", "") else None
    if row.recompute_class == "custom":
        choice: Recompute = "none" if fraction == 0 else _by_fraction(row, fraction or 1.0)[0]
        fraction = fraction and _by_fraction(row, fraction)[1]
    else:
        choice = _recompute(row, model, defaults)
    if row.recompute_class == "selective" and fraction is not None:
        choice = "full"  # of some layers
    return {"recompute": choice, "recompute_fraction": fraction if fraction and choice != "none" else 1.0}


def _recompute(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> Recompute:
    choice: Recompute
    if row.recompute_class not in ("none", "selective", "full"):
        latent = ": latent" if isinstance(model.block_runs[-1][0].attention, LatentAttention) else ""
        choice = defaults.assume("recompute", f": {row.sharding}{latent}")
        return choice
    # Megatron's "selective" drops the attention scores only, which fused attention never keeps (arXiv:2205.05198 section 5).
    if keeps_scores(row, model, defaults) and row.recompute_class == "selective":
        return "selective"
    is_scores_only = re.match("Megatron|NeMo", row.framework) and "+" not in row.recompute and "(l" not in row.recompute
    if row.recompute_class == "selective" and is_scores_only and ":m" not in row.recompute:
        return "none"
    if row.recompute_class == "selective" and row.framework.startswith("fms-fsdp"):
        return (
            "full"  # selective_checkpointing there is the fraction of the blocks that run again entirely; 1 by default
        )
    choice = row.recompute_class  # type: ignore[assignment]
    return choice


def _by_fraction(row: RunRow, fraction: float) -> tuple[Recompute, float]:
    """Return which recompute stands for a fraction of a stage: of its blocks, or under Aceso of its operators."""
    if not row.framework.startswith("Aceso"):
        return "full", fraction
    if fraction < (1 + _ACESO_CORE) / 2:
        return "selective", min(fraction / _ACESO_CORE, 1.0)
    return "full", fraction


def recompute_fraction(row: RunRow) -> float | None:
    """Return the fraction of the blocks whose activations are recomputed where the row says so."""
    text = row.recompute.lower()
    if fractions := listed_fractions(text):
        return sum(fractions) / len(fractions)
    if match := re.search(r"every (\d+)", text):
        return 1 / max(int(match[1]), 1)
    if (match := re.search(r"(?:first )?(\d+)(?: of (\d+))? (?:layers|blocks)", text)) and row.layers:
        num_layers = int(match[2]) if match[2] else row.layers
        return min(int(match[1]) / max(num_layers, 1), 1.0)
    if match := re.search(r"(\d+(?:\.\d+)?) ?%", text):
        return min(float(match[1]) / 100, 1.0)
    layers = _noted_numbers("gradient_checkpointing", row.notes)
    return min(sum(layers) / row.layers, 1.0) if layers and row.layers else None


class OffloadChoice(NamedTuple):
    """Fields of a Layout, and the drives that hold what is offloaded (0: the host's memory)."""

    offload: Offload = "none"
    offload_fraction: float = 1.0
    offload_activations: float = 0.0
    num_drives: int = 0


def _offload_fields(row: RunRow, zero_stage: int) -> dict[str, Any]:
    choice = offload_of(row)
    offload = choice.offload
    if offload == "parameters" and zero_stage in (1, 2):
        offload = "optimizer"  # parameters that are not sharded are not offloaded
    return {
        "offload": offload,
        "offload_fraction": choice.offload_fraction,
        "offload_activations": choice.offload_activations,
        "offload_to": "storage" if choice.num_drives else "host",
    }


def offload_of(row: RunRow) -> OffloadChoice:
    """Return what a row says it offloads."""
    words = row.offload.lower()
    if words in ("", "none", "no", "false", "0", "off", "not stated", "unknown"):
        return OffloadChoice()
    if "mixed" in words:
        return _tuned_offload(row)
    percent = re.search(r"(\d+(?:\.\d+)?) ?%", words)
    fraction = float(percent[1]) / 100 if percent else 1.0
    layers = re.search(r"(\d+) layers", words)
    activations = min(int(layers[1]) / row.layers, 1.0) if layers and row.layers else fraction
    moves_states = re.search(r"optim|adam|param|weight|full|state|model", words) or "activ" not in words
    offload: Offload = "none"
    if moves_states and fraction > 0:
        is_all = re.search(r"param|weight|full|model", words) and row.sharding_class not in ("zero1", "zero2")
        offload = "parameters" if is_all and fraction == 1 else "optimizer"
    moves_activations = "activ" in words
    if offload == "parameters" and re.match("Megatron-DeepSpeed ZeRO-3", row.framework):
        moves_activations = True  # its ZeRO-3 script checkpoints into the host's memory (--checkpoint-in-cpu)
    drives = re.search(r"(\d+) ssd", words)
    return OffloadChoice(
        offload,
        fraction if offload != "none" else 1.0,
        activations if moves_activations else 0.0,
        int(drives[1]) if drives else int(bool(re.search("nvme|disk|ssd|storage", words))),
    )


def _tuned_offload(row: RunRow) -> OffloadChoice:
    """Return the mean over the stages of a plan of Mist."""
    stages = _fractions_on_host(row)
    if not stages:
        return OffloadChoice()
    states = sum(stage[2] for stage in stages) / len(stages)
    activations = sum(stage[3] for stage in stages) / len(stages)
    return OffloadChoice("optimizer" if states else "none", states or 1.0, activations)


def _fractions_on_host(row: RunRow) -> list[list[float]]:
    """Return Mist's four fractions on the host of each stage: parameters, gradients, optimizer states, activations."""
    stages = re.findall(r"- - \d+ - \d+ - \d+ - \d+ - \d+ - \d+((?: - \d\.\d+){4})", row.notes)
    return [[float(number) for number in re.findall(r"\d\.\d+", stage)] for stage in stages]


def stage_layouts(row: RunRow, layout: Layout) -> tuple[Layout, ...]:
    """Return the layout of each stage where they recompute or offload different fractions; otherwise none."""
    recomputed, states = stage_fractions(row)
    if layout.pp == 1 or max(len(recomputed), len(states)) != layout.pp:
        return ()
    changes: list[dict[str, Any]] = [{} for _ in range(layout.pp)]
    for change, fraction in zip(changes, recomputed, strict=False):
        choice, of_blocks = _by_fraction(row, fraction) if fraction else ("none", 1.0)
        change |= {"recompute": choice, "recompute_fraction": of_blocks}
    for change, fraction in zip(changes, states, strict=False):
        change |= {"offload": "optimizer" if fraction else "none", "offload_fraction": fraction or 1.0}
    return tuple(layout.replace(**change) for change in changes)


def stage_fractions(row: RunRow) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return, by stage where the row says it, the fraction of its blocks that recompute and of its optimizer states on the host."""
    recomputed = listed_fractions(row.recompute)
    blocks, counts = (_noted_numbers(name, row.notes) for name in ("layer_partitions", "gradient_checkpointing"))
    if blocks and len(blocks) == len(counts):
        recomputed = tuple(min(count / n, 1.0) for n, count in zip(blocks, counts, strict=True))
    return recomputed, tuple(stage[2] for stage in _fractions_on_host(row))


def stage_cuts(row: RunRow) -> tuple[int, ...]:
    """Return where a row's stages begin and end, in layers with embedding and head, as far as the row says it.

    Mist lists blocks (layer_partitions), Sailor layers with embedding and head (layers_per_stage).
    """
    blocks = _noted_numbers("layer_partitions", row.notes)
    if blocks and len(blocks) == (row.pp or 1) and sum(blocks) == row.layers:
        return (0, *(1 + sum(blocks[: s + 1]) for s in range(len(blocks) - 1)), row.layers + 2)
    stated = re.search(r"layers_per_stage=\[([\d, ]+)\]", row.notes)
    layers = [int(number) for number in re.findall(r"\d+", stated[1])] if stated else []
    if layers and len(layers) == (row.pp or 1) and row.layers and sum(layers) == row.layers + 2:
        return (0, *(sum(layers[: s + 1]) for s in range(len(layers))))
    return ()


def stages_differ_in_devices(row: RunRow) -> bool:
    """Return whether the stages of a row have different numbers of devices."""
    match = re.search(r"stage gpus=\[([\d, ]+)\]", row.notes)
    return bool(match) and len(set(match[1].replace(" ", "").split(","))) > 1  # type: ignore[index]


def listed_fractions(text: str) -> tuple[float, ...]:
    """Return the numbers of ``[0.5, 0.25]``, at most 1 each; none where there is no such list."""
    match = re.search(r"\[([\d\s.,]+)\]", text)
    numbers = re.split(r"[\s,]+", match[1].strip(" ,\t")) if match else []
    if not all(re.fullmatch(r"\d+(?:\.\d+)?", number) for number in numbers):
        return ()
    return tuple(min(float(number), 1.0) for number in numbers)


def _noted_numbers(name: str, notes: str) -> list[int]:
    match = re.search(name + r":((?: - \d+)+)", notes)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []
