"""How a row was laid out and executed: degrees, sharding, recompute, offloading, precision, optimizer, adapters and kernels.

As stated, or as its framework does by default. What Mist and Aceso tuned by stage stands in a row's notes.
"""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any, Literal, NamedTuple, cast, get_args

from ..schema import Device, Layout, ModelSpec, Workload
from ..schema.engine_facts import ENGINES
from ..schema.layers import LatentAttention, MoE
from ..schema.layout import Offload, Recompute
from ..schema.task import Fusion, LowRank, Module, Optimizer, Precision
from .noted import listed_fractions, noted_numbers, stage_fractions, tuned_stages
from .rows import FrameworkDefaults, RunRow, read_table, stated

_ACESO_CORE = 3 / 13
"""Scores, softmax and dropout of unfused attention among the operators of an Aceso block (its model_ops.py), recomputed first
because they keep most for their seconds."""

_ZERO_STAGES = {"none": 0, "lora": 0, "zero1": 1, "zero2": 2, "zero3": 3}

_PREFIX_TUNING = LowRank(rank=1, targets=("qkv", "out", "mlp"), dropout=False)
"""Prefix vectors, or a scale and a bias on every product: a rank-1 adapter has as many parameters and kernels."""


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


# --- layout ----------------------------------------------------------------------------------------------------------


def layout_of(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> Layout:
    """Return the layout of a row; where stages differ, their mean.

    Raises:
        ConfigError: the degrees contradict one another.
    """
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max((row.n_gpus or 1) // (tp * pp * cp), 1)
    zero_stage = _zero_stage(row, defaults)
    group = _sharding_group(row, dp, cp) if zero_stage else 1
    sequence_parallel = row.seq_parallel == "yes"
    if tp > 1 and row.seq_parallel not in ("yes", "no"):
        sequence_parallel = bool(defaults.assume("sequence_parallel", f": {row.gpu_class or row.gpu_type}"))
    offload = offload_of(row)
    # Parameters that are not sharded are not offloaded.
    cannot_offload_parameters = group > 1 and zero_stage in (1, 2)
    return Layout(
        dp_replicate=dp // group,
        dp_shard=group,
        cp=cp,
        cp_ulysses=cp if _exchanges_heads(row, defaults) else 1,
        tp=tp,
        pp=pp,
        ep=row.ep or 1,
        etp=_expert_tp(row, dp * cp * tp, defaults),
        num_model_chunks=_num_chunks(row, model, defaults) if pp > 1 else 1,
        micro_batch_size=row.micro_batch or 1,
        zero_stage=cast("Any", zero_stage if group * cp > 1 else 0),
        sequence_parallel=tp > 1 and sequence_parallel,
        **_recompute_fields(row, model, defaults),
        offload="optimizer" if offload.offload == "parameters" and cannot_offload_parameters else offload.offload,
        offload_fraction=offload.fraction,
        offload_activations=offload.activations,
        offload_to="storage" if offload.num_drives else "host",
    )


def _exchanges_heads(row: RunRow, defaults: FrameworkDefaults) -> bool:
    """Return whether context ranks exchange tokens for heads around attention; otherwise keys and values go round a ring."""
    text = " ".join((row.framework, row.sharding, row.notes))
    return bool(defaults.noted("context", stated("context", text)) == "heads")


def num_chunks(row: RunRow) -> int:
    """Return the model chunks of a pipeline rank."""
    return max(int(stated("chunks", row.vpp) or 1), 1)


def _num_chunks(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> int:
    """Return the model chunks of a pipeline rank: as stated, else one block each where the framework's recipes have that."""
    blocks, pp = model.num_blocks, row.pp or 1
    has_column = bool(row.vpp) or not row.experts or blocks % pp
    is_assumed = not has_column and defaults.value("model_chunks") == "blocks"
    if is_assumed:
        defaults.assumed.append(f"vpp={blocks // pp}")
    return blocks // pp if is_assumed else num_chunks(row)


def _zero_stage(row: RunRow, defaults: FrameworkDefaults) -> int:
    name = row.sharding_class if row.sharding_class in (*_ZERO_STAGES, "hybrid") else defaults.assume("sharding")
    if name == "hybrid":
        return 1 if "zero-1" in row.sharding.lower() else 3
    return _ZERO_STAGES[name]


def _sharding_group(row: RunRow, dp: int, cp: int) -> int:
    """Return the data-parallel ranks over which states are sharded: as printed, a node for hybrid sharding, else all."""
    size = dp
    if printed := stated("sharding group", row.sharding):
        size = max(int(printed) // cp, 1)
    elif row.sharding_class == "hybrid":
        size = row.gpus_per_node or 8
    return size if size < dp and dp % size == 0 else dp


def _expert_tp(row: RunRow, stage_ranks: int, defaults: FrameworkDefaults) -> int:
    """Return the ranks that share one expert: as stated, else the framework's choice where the ranks of a stage allow it."""
    ep, tp = row.ep or 1, row.tp or 1
    if row.etp is not None or ep == 1 or tp == 1:
        return row.etp or 1
    return tp if defaults.assume("experts_follow_tp") and stage_ranks % (ep * tp) == 0 else 1


def _recompute_fields(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> dict[str, Any]:
    """Return which recompute, and of which fraction of the blocks."""
    choice: Recompute
    fraction = _recompute_fraction(row) if row.recompute_class not in ("none", "unknown", "") else None
    if row.recompute_class == "custom":
        choice, fraction = ("none", fraction) if fraction == 0 else _by_fraction(row, fraction or 1.0)
    else:
        choice = _recompute(row, model, defaults)
    if row.recompute_class == "selective" and fraction is not None:
        choice = "full"  # of some layers
    return {"recompute": choice, "recompute_fraction": fraction if fraction and choice != "none" else 1.0}


def _recompute(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> Recompute:
    if row.recompute_class not in ("none", "selective", "full"):
        return cast("Recompute", defaults.assume("recompute", f": {row.sharding}{_recomputed_trait(row, model)}"))
    if row.recompute_class == "selective" and not keeps_scores(row, model, defaults):
        meaning = defaults.value("selective_recompute")
        if meaning == "core" and not recompute_modules(row):
            return "none"  # fused attention never keeps its scores
        if meaning == "blocks":
            return "full"
    return cast("Recompute", row.recompute_class)


def _recomputed_trait(row: RunRow, model: ModelSpec) -> str:
    """Return what recipes choose recompute by: latent attention, or biases of experts with precision and release."""
    biased = f": biased experts, {row.precision}, release {_release(row)}" if _has_biased_experts(model) else ""
    return ": latent" if _has_latent_attention(model) else biased


def recompute_modules(row: RunRow) -> tuple[Module, ...]:
    """Return what a row says it recomputes, as Megatron's --recompute-modules names it; none where scores only."""
    named = {line["value"] for line in read_table("words") if line["choice"] == "module" and _says(row.recompute, line)}
    return tuple(name for name in get_args(Module) if name in named) if named - {"core_attn"} else ()


def _says(text: str, line: dict[str, str]) -> bool:
    return re.search(line["pattern"], text, re.IGNORECASE) is not None


def _by_fraction(row: RunRow, fraction: float) -> tuple[Recompute, float]:
    """Return which recompute stands for a fraction of a stage: of its blocks, or under Aceso of its operators."""
    if not row.framework.startswith("Aceso"):
        return "full", fraction
    if fraction <= _ACESO_CORE:
        return "selective", fraction / _ACESO_CORE
    return "full", (fraction - _ACESO_CORE) / (1 - _ACESO_CORE)


def _recompute_fraction(row: RunRow) -> float | None:
    """Return the fraction of the blocks whose activations are recomputed where the row says so."""
    if fractions := listed_fractions(row.recompute.lower()):
        return sum(fractions) / len(fractions)
    if ratio := stated("recomputed", row.recompute) or stated("recomputed by notes", row.notes):
        part, _, of = ratio.partition("/")
        stages = (row.pp or 1) if of == "stage" else 1
        total = row.layers and row.layers / stages if of in ("layers", "stage") else float(of)
        if total is not None:
            return min(float(part) / max(total, 1), 1.0)
    layers = noted_numbers("gradient_checkpointing", row.notes)
    return min(sum(layers) / row.layers, 1.0) if layers and row.layers else None


class OffloadChoice(NamedTuple):
    """What is offloaded: fractions of states and of activations, and the drives that hold it (0: the host's memory)."""

    offload: Offload = "none"
    fraction: float = 1.0
    activations: float = 0.0
    num_drives: int = 0


def offload_of(row: RunRow) -> OffloadChoice:
    """Return what a row says it offloads; of tuned stages the mean."""
    words = row.offload.lower()
    offload, stages = cast("Any", stated("offloaded", words)), tuned_stages(row)
    to_host = FrameworkDefaults(row).value(
        "checkpoints_on_host", f": {row.gpu_class or row.gpu_type}, {row.sharding_class}"
    )
    if offload == "nothing" or (offload == "by stage" and not stages):
        return OffloadChoice(activations=float(to_host))
    if offload == "by stage":
        states, activations = (fmean(getattr(s, name) for s in stages) for name in ("states", "activations"))
        return OffloadChoice("optimizer" if states else "none", states or 1.0, activations)
    percent, layers = (re.search(pattern, words) for pattern in (r"(\d+(?:\.\d+)?) ?%", r"(\d+) layers"))
    fraction = float(percent[1]) / 100 if percent else 1.0
    if fraction == 0:
        offload = "none"
    elif offload == "parameters" and (fraction != 1 or row.sharding_class in ("zero1", "zero2")):
        offload = "optimizer"
    activations = min(int(layers[1]) / row.layers, 1.0) if layers and row.layers else fraction
    return OffloadChoice(
        offload,
        fraction if offload != "none" else 1.0,
        activations if to_host or "activ" in words else 0.0,
        int(stated("drives", words) or 0),
    )


# --- workload --------------------------------------------------------------------------------------------------------


def workload_of(row: RunRow, model: ModelSpec, layout: Layout, defaults: FrameworkDefaults, device: Device) -> Workload:
    """Return the workload of a row; ``defaults`` records what it does not state.

    Raises:
        ConfigError: sizes contradict one another.
    """
    batch = row.global_batch
    if batch is None:
        batch = layout.dp * layout.micro_batch_size * (row.grad_accum or 1)
        defaults.assumed.append("global_batch=one pass")
    precision = base_precision(row)
    if not precision:
        precision = defaults.assume("precision")
        if precision == "bf16" and device.peak_flops_per_s.bf16 is None:
            precision = "fp16"
    if precision == "fp32" and device.peak_flops_per_s.tf32 is not None:
        precision = defaults.value("fp32_products")
    is_mixed = precision == "fp16" or (
        precision == "bf16" and not stated("pure bf16", f"{row.precision}@{row.sharding}")
    )
    adapters, blocking = adapters_of(row, defaults), stated("blocking launches", row.notes)
    trained = "adapters" if adapters else "all"
    of_time = f": {row.gpu_class or row.gpu_type}, {row.software_date or 'undated'}"
    is_lean = not row.optimizer and defaults.value("lean_optimizer", f": {trained}, {row.n_gpus} devices")
    facts = ENGINES[_engine(row, layout, defaults)]
    named = str(defaults.value("recompute_modules", _recomputed_trait(row, model)))
    modules = recompute_modules(row) or tuple(cast("Module", name) for name in named.split())
    is_per_operator = defaults.value("selective_recompute") == "alternate_products" and "layer" not in row.recompute
    generation = defaults.noted("flash_generation", stated("flash generation", row.notes))
    return Workload(
        seq_len=row.seq_len or 1,
        global_batch_size=batch,
        precision=cast("Precision", f"{precision}-mixed" if is_mixed else precision),
        optimizer=cast("Optimizer", stated("optimizer", row.optimizer)),
        document_len=defaults.value("packed_document") if row.task in ("sft", "lora") else None,
        adapters=adapters,
        engine=cast("Any", _engine(row, layout, defaults)),
        flash_generation=cast("Any", int(generation) if str(generation).isdigit() else generation),
        expert_imbalance=_imbalance(row, layout, defaults),
        token_dispatch=_token_dispatch(row, model, layout, defaults) if row.experts else "engine",
        overlap=defaults.noted("overlap", False if stated("no overlap", row.notes) else None, of_time),
        blocking_launches=defaults.noted("blocking_launches", blocking and blocking == "yes"),
        selective="alternate_products" if is_per_operator else "products",
        dropout=defaults.value("dropout"),
        fusion=_fusion(row, defaults),
        fp8_scaling=cast("Any", stated("fp8 scaling", row.precision)),
        recompute_modules=modules if facts.is_eager_like_megatron and layout.recompute == "selective" else (),
        loss=cast("Any", defaults.noted("loss", stated("loss", row.notes))),
        update=cast("Any", stated("update", f"{row.optimizer} {row.notes}") or ("in_backward" if is_lean else "step")),
        paged_states=is_lean or stated("paged states", row.optimizer) is not None,
        fp8_activation_input=defaults.value("fp8_activation_input", f": {trained}, cp {layout.cp}"),
        attention="math" if keeps_scores(row, model, defaults) else "flash",
    )


def _engine(row: RunRow, layout: Layout, defaults: FrameworkDefaults) -> str:
    return str(defaults.value("engine", _sizes(row, layout)))


def has_known_engine(row: RunRow, layout: Layout, defaults: FrameworkDefaults) -> bool:
    """Return whether the table, or what is known of the row's framework, says whose kernels and host code ran."""
    return defaults.is_known("engine", _sizes(row, layout))


def _sizes(row: RunRow, layout: Layout) -> str:
    return f": {row.sharding_class}, tp {layout.tp}, pp {layout.pp}, {row.precision_class}"


def with_switches(
    layout: Layout, row: RunRow, model: ModelSpec, workload: Workload, defaults: FrameworkDefaults, *, has_graphs: bool
) -> Layout:
    """Return the layout with how its engine communicates and dispatches, as the row or the engine's recipes say."""
    # Megatron-LM turns accumulate_allreduce_grads_in_fp32 on for bf16 only.
    gradients = "compute" if workload.precision == "fp16-mixed" else defaults.value("gradients")
    run = _run_of_recipe(row, model, layout)
    has_graphs = has_graphs and _switch("cuda_graphs", "graphs", row, run, defaults)
    can_overlap = layout.ep > 1 and (layout.pp == 1 or layout.num_model_chunks > 1) and layout.recompute != "full"
    return layout.replace(
        gradients=defaults.stated("gradients") or stated("gradients", row.precision) or gradients,
        tp_overlap=layout.sequence_parallel and defaults.value("tp_overlap"),
        cuda_graphs=has_graphs,
        expert_graphs=has_graphs and bool(row.experts) and defaults.value("expert_graphs", run),
        ep_overlap=can_overlap and _switch("ep_overlap", "exchange overlap", row, run, defaults),
    )


_IMBALANCE_A_DOUBLING = 0.04
"""Rows of the fullest rank over the average, less 1, for each doubling of ep: 0.03 over 2 ranks, 0.05 to 0.10 over 4, 0.11 to 0.16
over 8, on web text (loads of Mixtral-8x7B and OLMoE-1B-7B, allenai/OLMoE scripts/routing_output, Apache-2.0)."""


def _imbalance(row: RunRow, layout: Layout, defaults: FrameworkDefaults) -> tuple[tuple[int, float], ...]:
    """Return the imbalance of a router that is not told to balance; none where it is, or where no tokens travel."""
    routing = defaults.noted("routing", stated("routing", row.notes))
    if not row.experts or layout.ep == 1 or routing == "even":
        return ()
    return ((layout.ep, 1 + _IMBALANCE_A_DOUBLING * math.log2(layout.ep)),)


def _token_dispatch(
    row: RunRow, model: ModelSpec, layout: Layout, defaults: FrameworkDefaults
) -> Literal["engine", "copies"]:
    """Return how tokens travel between nodes: as the notes of a row say, else as recipes of its framework do."""
    noted = stated("token dispatch", row.notes)
    run = _run_of_recipe(row, model, layout)
    return cast("Literal['engine', 'copies']", defaults.noted("token_dispatch", noted, run))


def _release(row: RunRow) -> str:
    return row.software_date[2:].replace("-", ".") or "unknown"


def _has_latent_attention(model: ModelSpec) -> bool:
    return isinstance(getattr(model.block_runs[-1][0], "attention", None), LatentAttention)


def _has_biased_experts(model: ModelSpec) -> bool:
    mlp = getattr(model.block_runs[-1][0], "mlp", None)
    return isinstance(mlp, MoE) and mlp.expert.bias


def _run_of_recipe(row: RunRow, model: ModelSpec, layout: Layout) -> str:
    """Return what recipes of one framework differ by: device, experts, precision, stages of a rank, release, attention."""
    kind = "dense" if not row.experts else "biased experts" if _has_biased_experts(model) else "experts"
    stages = f"{layout.pp}x{layout.num_model_chunks}"
    latent = ", latent" if _has_latent_attention(model) else ""
    return f": {row.gpu_type}, {kind}, {row.precision}, stages {stages}, release {_release(row)}{latent}"


def _switch(choice: str, words: str, row: RunRow, run: str, defaults: FrameworkDefaults) -> bool:
    """Return whether a switch was on: as the row's column or notes say, else as the framework's recipes have it for such a run."""
    said = stated(words, row.notes)
    return bool(defaults.noted(choice, said and said == "on", run))


def base_precision(row: RunRow) -> str | None:
    """Return the precision that products run in, of a frozen model what it is dequantised to; empty: not stated, None: unknown."""
    return stated("precision", f"{row.precision_class}@{row.precision}")


def adapters_of(row: RunRow, defaults: FrameworkDefaults) -> LowRank | None:
    """Return the adapters that a row trains next to a frozen model, recorded as assumed; None where all parameters are trained."""
    others = (row.sharding_class, row.precision_class, row.precision, row.optimizer)
    kind = stated("adapters", f"{row.task}@{' '.join(others)}")
    if kind is None:
        return None
    adapters = _PREFIX_TUNING if kind == "prefix" else LowRank(**defaults.value("adapters"))
    frozen = stated("frozen", f"{row.precision} {row.task} @{row.precision_class}")
    if frozen:
        adapters = adapters.replace(frozen=frozen)
    defaults.assumed.append(f"adapters=rank {adapters.rank} on {'+'.join(adapters.targets)}")
    return adapters


def keeps_scores(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> bool:
    """Return whether attention ran without a fused kernel: as the row says, else on Volta and in engines of its time."""
    if (is_unfused := defaults.stated("unfused_attention")) is not None:
        return bool(is_unfused)
    if attention := stated("attention", row.notes):
        return attention == "math"
    # Gated feed-forward layers came after FlashAttention, and the scripts for such models turn it on where it runs.
    norm = model.block_runs[-1][0].norm
    is_unfused = defaults.value("unfused_attention", f": {norm}, {row.gpu_class or row.gpu_type}, {row.sharding_class}")
    return row.gpu_type.startswith("V100") or (bool(is_unfused) and norm != "rmsnorm")


def _fusion(row: RunRow, defaults: FrameworkDefaults) -> Fusion:
    if fusion := defaults.stated("fusion"):
        return cast("Fusion", fusion)
    if stated("compiled", row.notes) == "yes":
        return cast("Fusion", defaults.value("compiled"))
    return cast("Fusion", defaults.value("fusion", f": {row.precision_class}"))
