"""What a row says in words beside its degrees: adapters, offloading, recompute of a part, stages that differ."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..schema.layout import Offload
from ..schema.task import LowRank
from .rows import RunRow

ADAPTERS: tuple[tuple[str, LowRank, str], ...] = (
    ("LitGPT", LowRank(rank=8, targets=("qkv",)), "lora_r 8 on query and value by default"),
    ("NeMo/Megatron$", LowRank(rank=16), "MLPerf's reference: rank 16 on qkv and the output projection"),
    (
        ".*(NeMo|Megatron)",
        LowRank(rank=16, targets=("qkv",), dropout=False),
        "the performance recipes adapt linear_qkv only",
    ),
    ("LLaMA-Factory|torchtune|xtuner|.*[Aa]xolotl", LowRank(rank=8, targets=("qkv", "out", "mlp")), "lora_target: all"),
    ("", LowRank(rank=8, targets=("qkv",)), "PEFT adapts q_proj and v_proj, rank 8"),
)
"""Start of a framework's name, the adapters it trains unless told otherwise, and why that is known."""

_PREFIX_TUNING = LowRank(rank=1, targets=("qkv", "out", "mlp"), dropout=False)
"""Prefix vectors, or a scale and a bias on every product: a rank-1 adapter has as many parameters and kernels."""

DRIVE_BYTES_PER_S = 4.5e9
"""One data-centre NVMe drive reading and writing as much: 6.5 and 3.4 GB/s (Intel P5510 data sheet), harmonic mean."""


class OffloadChoice(NamedTuple):
    """Fields of a Layout, and the drives that hold what is offloaded (0: the host's memory)."""

    offload: Offload = "none"
    offload_fraction: float = 1.0
    offload_activations: float = 0.0
    num_drives: int = 0


def is_adapted(row: RunRow) -> bool:
    """Whether the row trains adapters beside a frozen model."""
    words = " ".join((row.task, row.sharding_class, row.precision_class, row.precision, row.optimizer)).lower()
    return bool(re.search(r"lora|adapter|peft|prefix", words))


def adapters_of(row: RunRow) -> tuple[LowRank, tuple[str, ...]] | None:
    """The adapters of a row and what was assumed about them; None where all parameters are trained."""
    if not is_adapted(row):
        return None
    if re.search(r"adapter|prefix", row.task.lower()):
        adapters = _PREFIX_TUNING
    else:
        adapters = next(choice for start, choice, _ in ADAPTERS if re.match(start, row.framework))
    words = f"{row.precision} {row.precision_class} {row.task}".lower()
    if re.search(r"nf4|int4|4.?bit|qlora", words):
        adapters = adapters.replace(frozen="nf4")
    elif re.search(r"int8|8.?bit", words) or row.precision_class in ("fp8", "mxfp8", "nvfp4"):
        adapters = adapters.replace(frozen="8-bit")
    return adapters, (f"adapters=rank {adapters.rank} on {'+'.join(adapters.targets)}",)


def base_precision(row: RunRow) -> str:
    """The class of the precision that products run in: of a quantised frozen model, what it is dequantised to."""
    name = row.precision_class.lower()
    if re.search(r"nf4|int4|int8|bit", name):
        return "fp16" if "fp16" in row.precision.lower() else "bf16"
    if name in ("", "unknown"):
        return name
    known = re.search(r"nvfp4|mxfp4|mxfp8|fp8|bf16|bfloat16|fp16|float16|half|tf32|fp32|float32", name)
    spelling = {
        "mxfp4": "nvfp4",
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "tf32": "fp32",
        "float32": "fp32",
    }
    return spelling.get(known[0], known[0]) if known else "unknown" if "lora" in name else name


def num_chunks(row: RunRow) -> int:
    """Model chunks of a pipeline rank: as counted; a named interleaved or zero-bubble schedule counts as two."""
    if re.fullmatch(r"\d+", row.vpp):
        return max(int(row.vpp), 1)
    return 1 if row.vpp.lower().replace("-", "") in ("", "none", "1f1b", "gpipe", "afab") else 2


def is_pure_bf16(row: RunRow) -> bool:
    """Whether parameters, gradients and states are bf16 without fp32 copies."""
    return bool(re.search(r"bf16-true|pure.?bf16", row.precision.lower())) or "PURE" in row.sharding


def offload_of(row: RunRow) -> OffloadChoice:
    """What a row says it offloads."""
    words = row.offload.lower()
    if words in ("", "none", "no", "false", "0", "off", "not stated", "unknown"):
        return OffloadChoice()
    if "mixed" in words:
        return _mist_offload(row)
    percent = re.search(r"(\d+(?:\.\d+)?) ?%", words)
    fraction = float(percent[1]) / 100 if percent else 1.0
    layers = re.search(r"(\d+) layers", words)
    part = min(int(layers[1]) / row.layers, 1.0) if layers and row.layers else fraction
    moves_states = re.search(r"optim|adam|param|weight|full|state|model", words) or "activ" not in words
    away: Offload = "none"
    if moves_states and fraction > 0:
        is_all = re.search(r"param|weight|full|model", words) and row.sharding_class not in ("zero1", "zero2")
        away = "parameters" if is_all and fraction == 1 else "optimizer"
    if away == "parameters" and re.match("Megatron-DeepSpeed ZeRO-3", row.framework) and "activ" not in words:
        words += " activations"  # its ZeRO-3 script checkpoints into the host's memory (--checkpoint-in-cpu)
    drives = re.search(r"(\d+) ssd", words)
    to_storage = int(drives[1]) if drives else int(bool(re.search("nvme|disk|ssd|storage", words)))
    return OffloadChoice(away, fraction if away != "none" else 1.0, part if "activ" in words else 0.0, to_storage)


def recompute_part(row: RunRow) -> float | None:
    """Part of the blocks whose activations are recomputed where the row says so; None where it does not."""
    text = row.recompute.lower()
    if parts := _list_of_parts(text):
        return sum(parts) / len(parts)
    if match := re.search(r"every (\d+)", text):
        return 1 / max(int(match[1]), 1)
    if (match := re.search(r"(?:first )?(\d+)(?: of (\d+))? (?:layers|blocks)", text)) and row.layers:
        whole = int(match[2]) if match[2] else row.layers
        return min(int(match[1]) / max(whole, 1), 1.0)
    if match := re.search(r"(\d+(?:\.\d+)?) ?%", text):
        return min(float(match[1]) / 100, 1.0)
    layers = _numbers("gradient_checkpointing", row.notes)
    return min(sum(layers) / row.layers, 1.0) if layers and row.layers else None


def stage_parts(row: RunRow) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage where the row says it: the part of its blocks that recompute, of its optimizer states on the host."""
    recomputed = _list_of_parts(row.recompute)
    blocks, kept = (_numbers(name, row.notes) for name in ("layer_partitions", "gradient_checkpointing"))
    if blocks and len(blocks) == len(kept):
        recomputed = tuple(min(k / n, 1.0) for n, k in zip(blocks, kept, strict=True))
    return recomputed, tuple(part[2] for part in _mist_parts(row))


def stage_cuts(row: RunRow) -> tuple[int, ...]:
    """Where a row's stages begin and end, in layers with embedding and head, as far as the row says it.

    Mist lists blocks (layer_partitions), Sailor layers with embedding and head (layers_per_stage).
    """
    blocks = _numbers("layer_partitions", row.notes)
    if blocks and len(blocks) == (row.pp or 1) and sum(blocks) == row.layers:
        return (0, *(1 + sum(blocks[: s + 1]) for s in range(len(blocks) - 1)), row.layers + 2)
    stated = re.search(r"layers_per_stage=\[([\d, ]+)\]", row.notes)
    layers = [int(number) for number in re.findall(r"\d+", stated[1])] if stated else []
    if layers and len(layers) == (row.pp or 1) and row.layers and sum(layers) == row.layers + 2:
        return (0, *(sum(layers[: s + 1]) for s in range(len(layers))))
    return ()


def _list_of_parts(text: str) -> tuple[float, ...]:
    """The numbers of ``[0.5, 0.25]``, at most 1 each; none where there is no such list."""
    match = re.search(r"\[([\d\s.,]+)\]", text)
    parts = re.split(r"[\s,]+", match[1].strip(" ,\t")) if match else []
    if not all(re.fullmatch(r"\d+(?:\.\d+)?", part) for part in parts):
        return ()
    return tuple(min(float(part), 1.0) for part in parts)


def _numbers(name: str, notes: str) -> list[int]:
    match = re.search(name + r":((?: - \d+)+)", notes)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


def differs_by_stage(row: RunRow) -> bool:
    """Whether the stages of a row have different numbers of devices."""
    match = re.search(r"stage gpus=\[([\d, ]+)\]", row.notes)
    return bool(match) and len(set(match[1].replace(" ", "").split(","))) > 1  # type: ignore[index]


def _mist_offload(row: RunRow) -> OffloadChoice:
    """Mean over the stages of Mist's four parts on the host: parameters, gradients, optimizer states, activations."""
    parts = _mist_parts(row)
    if not parts:
        return OffloadChoice()
    states = sum(part[2] for part in parts) / len(parts)
    activations = sum(part[3] for part in parts) / len(parts)
    return OffloadChoice("optimizer" if states else "none", states or 1.0, activations)


def _mist_parts(row: RunRow) -> list[list[float]]:
    stages = re.findall(r"- - \d+ - \d+ - \d+ - \d+ - \d+ - \d+((?: - \d\.\d+){4})", row.notes)
    return [[float(part) for part in re.findall(r"\d\.\d+", stage)] for stage in stages]
