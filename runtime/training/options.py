"""Options of the built-in training, the checks that a launcher makes of them, and where checkpoints lie; all without torch.

What only some options need (data, weights) is imported where it is looked at.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...schema import ConfigError, RuntimeMismatchError, TrainingPlan
from ...schema.base import Count, Frozen, OptionSpec
from ...schema.batch import why_no_packs
from ...schema.local_updates import MAX_STEPS
from ...schema.schedules import SCHEDULES
from ...schema.units import parse_count

MIN_ROBUST_RANKS = 4
"""With three, one wrong rank is a third of what is known."""

INFO_FILE = "checkpoint.json"
_STEP_FOLDER = re.compile(r"step-(\d{8})")

RobustSum = Literal["flag", "trimmed", "median"]

_Folder = OptionSpec(metavar="FOLDER")
_OfCheckpoints = OptionSpec(needs=("checkpoint_dir",))
_NoOption = OptionSpec(is_option=False)


def _parse_every(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else parse_count(text)


class TrainOptions(Frozen):
    """What the plan does not say about a training run.

    Attributes:
        steps: steps of the entire run, those before a resumed checkpoint included.
        data: text files and folders, or token files (`meshwright tokens`); repeatable. Default: Python's own sources.
        tokenizer: tokenizer.json for text, or its folder. Default: every byte is a token.
        documents: train on batches of entire documents, each attending to itself only, scheduled anew for every step; those longer
            than the plan's sequences are cut. They end with the files of text, in token files where `meshwright tokens` noted it.
        end_id: the token that ends documents, for token files that were made elsewhere.
        restart_data: begin the order of the data anew, for data that are not those of the checkpoint.
        seed: of the weights and of the order of the data.
        learning_rate: at its highest, after a linear warm-up.
        schedule: of the learning rate after the warm-up, down to a tenth.
        warmup_steps: steps of the warm-up. Default: a tenth of the steps.
        checkpoint_dir: folder for checkpoints; shared by all nodes.
        checkpoint_every: steps between checkpoints, or auto: as many as measured steps and saves and --mtbf-hours-per-device make
            best; there is one at the end as well. Default: only that one.
        mtbf_hours_per_device: mean hours between faults of one device, for --checkpoint-every auto. Default: 50000, as of Llama 3's
            training on 16,384 H100.
        keep_checkpoints: how many of the newest stay.
        copy_every: where a job goes on without a dead rank whose states no other holds: steps between their copies to another
            rank's memory. Default: as many as keep copying below 3 % of the time, by measurement.
        checkpoint_beside: write checkpoints while the next steps run; takes host memory.
        resume: go on from the newest checkpoint, if there is one.
        weights: Hugging Face safetensors to start from. Default: initial weights.
        save_weights: new folder for weights in Hugging Face's layout at the end, adapters merged into them; shared by all nodes.
        save_adapters: folder for trained adapters at the end, as peft reads them.
        recover: where states are lost for good, without a copy or a checkpoint: neighbours, whose mean a lost layer becomes; losses
            change.
        robust_sum: of the ranks' gradients take a mean that a few wrong ranks cannot spoil: flag (weights by rank), or a trimmed
            mean or the median of every element. Losses are then not those of the plain mean.
        zeroth_order: train by two forward passes, without backward passes and their memory; a plan made with --train zeroth-order
            needs no such option, of another plan only the layout then means anything.
        compile_blocks: torch.compile each block, where the plan allows it.
        trace: one measured step, the first after the warm-up, for ui.perfetto.dev, in the form that `plan --trace` gives the
            predicted one.
        count_memory: on CPUs: count the bytes of all tensors until the second step is over.
        router_bias_rate: how far a step moves the correction of a sigmoid router's scores towards even loads (DeepSeek-V3); 0: not
            at all.
        sync_every: of a plan whose regions train by themselves: inner steps between two sums, or auto: the plan's, and more
            while sums take longer than planned, up to its limit. Default: the plan's.
        outer_learning_rate, outer_momentum: of the SGD with Nesterov momentum by which such sums move the parameters of all regions
            (DiLoCo, arXiv:2311.08105: 0.7 and 0.9); 1 and 0: their mean.
        hot_experts: after each step have the experts with most tokens stand on every rank of ep in the next one, as many as move
            fewer bytes than their tokens do.
    """

    steps: Count = 20
    data: Annotated[tuple[str, ...], OptionSpec(metavar="PATH")] = ()
    tokenizer: Annotated[str | None, OptionSpec(metavar="FILE")] = None
    documents: bool = False
    end_id: Annotated[NonNegativeInt | None, OptionSpec(metavar="ID", needs=("documents",))] = None
    restart_data: Annotated[bool, OptionSpec(needs=("resume",))] = False
    seed: NonNegativeInt = 0
    learning_rate: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt | None = None
    weight_decay: Annotated[NonNegativeFloat, _NoOption] = 0.1
    betas: Annotated[tuple[float, float], _NoOption] = (0.9, 0.95)
    max_grad_norm: Annotated[PositiveFloat, _NoOption] = 1.0
    checkpoint_dir: Annotated[str | None, _Folder] = None
    checkpoint_every: Annotated[
        PositiveInt | Literal["auto"] | None, _OfCheckpoints._replace(metavar="N|auto", parse=_parse_every)
    ] = None
    mtbf_hours_per_device: Annotated[PositiveFloat | None, OptionSpec(metavar="H", needs=("checkpoint_every",))] = None
    keep_checkpoints: Annotated[PositiveInt, _OfCheckpoints] = 2
    copy_every: Annotated[Count | None, OptionSpec(metavar="N")] = None
    checkpoint_beside: Annotated[bool, _OfCheckpoints] = False
    resume: Annotated[bool, _OfCheckpoints] = False
    weights: Annotated[str | None, _Folder] = None
    save_weights: Annotated[str | None, _Folder] = None
    save_adapters: Annotated[str | None, _Folder] = None
    robust_sum: RobustSum | None = None
    recover: Literal["neighbours"] | None = None
    zeroth_order: bool = False
    compile_blocks: Annotated[bool, OptionSpec(name="--compile")] = False
    trace: Annotated[str | None, OptionSpec(metavar="FILE.json")] = None
    count_memory: bool = False
    router_bias_rate: NonNegativeFloat = 1e-3
    sync_every: Annotated[
        Annotated[int, Field(gt=0, le=MAX_STEPS)] | Literal["auto"] | None,
        OptionSpec(metavar="H|auto", parse=_parse_every),
    ] = None
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    hot_experts: bool = False

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of ``learning_rate`` at a step from 1: a linear warm-up, then down to a tenth, or constant."""
        warmup = self.warmup_steps if self.warmup_steps is not None else max(1, round(self.steps * 0.1))
        if step <= warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        remaining = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
        return 0.1 + 0.9 * remaining[self.schedule]


def prepare_options(plan: TrainingPlan, options: TrainOptions) -> TrainOptions:
    """Return the options with text made into tokens, after checking everything about them that can be wrong; starts nothing.

    Raises:
        ConfigError: no data, too little of it, not those of the model's vocabulary, or options that contradict.
        RuntimeMismatchError: the plan cannot be compiled, or trained so.
    """
    from .samples import open_batches, tokenize_paths

    if options.checkpoint_dir is None and (options.checkpoint_every or options.resume):
        raise ConfigError("--checkpoint-every and --resume need a folder", help="add --checkpoint-dir DIR")
    if options.mtbf_hours_per_device is not None and options.checkpoint_every != "auto":
        raise ConfigError(
            "--mtbf-hours-per-device decides how often --checkpoint-every auto saves",
            help="say --checkpoint-every auto, or leave it out",
        )
    present = list_checkpoints(options.checkpoint_dir) if options.checkpoint_dir and not options.resume else ()
    if present:
        raise ConfigError(
            f"{options.checkpoint_dir} already holds {present[-1].name}",
            help="add --resume to go on from it, or give another --checkpoint-dir",
        )
    require_local(plan, options)
    if options.compile_blocks:
        require_compilable(plan)
    if options.checkpoint_dir:
        _require_writable(options.checkpoint_dir)
    if options.hot_experts:
        from .expert_load import require_hot_experts

        require_hot_experts(plan, compiles=options.compile_blocks)
    if options.robust_sum:
        require_robust_sum(plan, is_zeroth_order=options.zeroth_order)
    if options.zeroth_order or not plan.workload.has_backward:
        require_zeroth_order(plan)
    if options.save_adapters and plan.workload.adapters is None:
        raise ConfigError("--save-adapters, but the plan trains no adapters", help="plan with --train lora:r=16")
    if options.weights:
        from ..weights.load import check_weights

        check_weights(plan.model, options.weights)
    if options.save_weights:
        from ..weights.save import check_weights_target

        check_weights_target(plan.model, options.save_weights)
    options = options.replace(data=tokenize_paths(options.data, options.tokenizer), tokenizer=None)
    if options.documents:
        from .documents import open_documents

        require_documents(plan, compiles=options.compile_blocks)
        open_documents(plan, options.data, seed=options.seed, end_id=options.end_id)
        return options
    open_batches(plan, options.data, seed=options.seed, rows=range(1))
    return options


def require_compilable(plan: TrainingPlan) -> None:
    """Refuse what torch.compile does not take."""
    reasons = []
    if SCHEDULES[plan.layout.schedule].splits_backward:
        reasons.append(f"schedule {plan.layout.schedule} splits backward passes, a compiled block has one")
    if plan.layout.cp > 1:
        reasons.append("attention over the ranks of cp cannot be traced")
    if plan.layout.tp_halves:
        reasons.append("a block by half-batches waits for collectives that it started, which cannot be traced")
    if any(stage.offload_of(idx) != "none" for stage in plan.stages for idx in stage.layer_idxs):
        reasons.append("what a compiled block keeps is not what the offload schedule moves")
    if plan.cluster.weakest_device.backend.is_host and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        reasons.append("on a CPU torch.compile needs a C++ compiler (g++), and there is none")
    if reasons:
        raise RuntimeMismatchError(
            "--compile does not suit this plan", details=tuple(reasons), help="leave out --compile"
        )


def require_documents(plan: TrainingPlan, *, compiles: bool = False) -> None:
    """Refuse plans that cannot be trained on batches of documents."""
    reasons = []
    if plan.layout.pp > 1:
        reasons += why_no_packs(plan.layout.schedule)
    if plan.degrees_by_stage:
        reasons.append("stages of unlike tp deal out hidden states of one shape")
    if plan.offload is not None:
        reasons.append("an offload schedule is made for micro-batches of one shape")
    if plan.layout.tp_halves:
        reasons.append("a pack of documents is one sequence, which tp_halves cannot halve")
    if compiles:
        reasons.append("a block that is compiled has one shape")
    if reasons:
        raise RuntimeMismatchError(
            "the plan cannot be trained on documents", details=tuple(reasons), help="plan with --fix pp=1,schedule=1f1b"
        )


def require_zeroth_order(plan: TrainingPlan) -> None:
    """Refuse plans that cannot be trained by two forward passes."""
    if plan.layout.pp > 1 or plan.offload is not None:
        raise RuntimeMismatchError(
            "zeroth-order training does not run over a pipeline, nor with an offload schedule",
            details=(f"pp {plan.layout.pp}, offload {plan.layout.offload}",),
            help="plan with --fix pp=1 and without --offload",
        )


def require_robust_sum(plan: TrainingPlan, *, is_zeroth_order: bool = False) -> None:
    """Refuse plans whose gradients are not summed once a step over data-parallel ranks alone, as many as tell a wrong one."""
    layout, degree = plan.layout, max(plan.layout.dp_replicate, plan.layout.dp_shard)
    is_plain = layout.dp_shard == 1 and layout.zero_stage == 0 and plan.workload.is_full_precision
    reasons = []
    if layout.world_size != degree or degree < MIN_ROBUST_RANKS:
        reasons.append(
            f"it takes at least {MIN_ROBUST_RANKS} ranks that differ in their data alone; the layout is {layout}"
        )
    elif not is_plain and not (layout.dp_replicate == 1 and layout.zero_stage == 1):
        reasons.append(
            f"gradients are shared out as zero_stage {layout.zero_stage}, dp_replicate {layout.dp_replicate}; it takes zero_stage "
            "1 and dp_shard alone, or in fp32 dp_replicate alone"
        )
    if len(set(plan.batch_shares)) > 1:
        reasons.append(f"shares of {plan.batch_shares} sequences: gradients of unlike shares are not alike")
    if plan.offload is not None or not plan.workload.has_backward or is_zeroth_order:
        reasons.append("it is not for an offload schedule, nor for zeroth-order steps")
    if reasons:
        raise RuntimeMismatchError(
            "--robust-sum does not suit this plan", details=tuple(reasons),
            help="plan with --fix dp_shard=N,zero_stage=1, or leave it out",
        )  # fmt: skip


def why_not_continued(plan: TrainingPlan, options: TrainOptions) -> tuple[str, ...]:
    """Return why a training cannot go on without a rank that dies, but only start again (supervision/)."""
    layers = plan.model.iter_layers()
    lacks = [
        (plan.local_updates is not None, "its regions train by themselves, each a job of its own"),
        (plan.offload is not None, "what is offloaded to the host is on no other rank"),
        (options.zeroth_order or not plan.workload.has_backward, "zeroth-order steps move parameters before all agree"),
        (options.robust_sum is not None, "fewer ranks may not be enough for --robust-sum"),
        (options.documents, "plans for fewer devices do not say what --documents cost"),
        (options.hot_experts, "--hot-experts exchanges experts after the update"),
        (
            options.router_bias_rate > 0 and any(getattr(layer.experts, "router", "") == "sigmoid" for layer in layers),
            "corrections of sigmoid routers are exchanged after the update (--router-bias-rate 0 leaves them)",
        ),
    ]  # fmt: skip
    return tuple(text for is_lacking, text in lacks if is_lacking)


def why_not_local(plan: TrainingPlan, options: TrainOptions) -> tuple[str, ...]:
    """Return why a training cannot have local updates."""
    layers = plan.model.iter_layers()
    sigmoid = any(getattr(layer.experts, "router", "") == "sigmoid" for layer in layers)
    lacks = [
        (options.documents, "--documents schedules the batches of one job"),
        (options.zeroth_order, "zeroth-order steps draw one direction for all"),
        (options.checkpoint_every == "auto", "regions must save after the same steps: give --checkpoint-every N"),
        (options.hot_experts, "--hot-experts moves experts after the load of one job"),
        (
            sigmoid and options.router_bias_rate > 0,
            "corrections of sigmoid routers are not summed up (--router-bias-rate 0 leaves them)",
        ),
    ]  # fmt: skip
    return tuple(text for is_lacking, text in lacks if is_lacking)


def require_local(plan: TrainingPlan, options: TrainOptions) -> None:
    """Refuse options that do not go with local updates, and `--sync-every` where there are none.

    Raises:
        RuntimeMismatchError: one does not; each is named.
    """
    if plan.local_updates is None:
        if options.sync_every is not None:
            raise RuntimeMismatchError(
                "--sync-every, but gradients are summed up each step in this plan", help="plan with --sync auto"
            )
        return
    if why := why_not_local(plan, options):
        raise RuntimeMismatchError("local updates do not suit this training", details=why, help="plan with --sync step")


def list_checkpoints(root: str | Path) -> tuple[Path, ...]:
    """Return the complete checkpoints under ``root``, oldest first; none where the folder does not exist."""
    root = Path(root)
    folders = root.iterdir() if root.is_dir() else ()
    complete = (path for path in folders if _STEP_FOLDER.fullmatch(path.name) and (path / INFO_FILE).is_file())
    return tuple(sorted(complete, key=lambda path: path.name))


def _require_writable(root: str) -> None:
    """Make the folder of the checkpoints and write in it, before a run depends on it."""
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"checkpoints fit")
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {root}: {error.strerror}") from None
