"""One rank's step, rehearsed: the runtime's own path under a process group that sends nothing and tensors that have no memory.

`parallelize` splits the model on the meta device as in a job; from there on everything is a fake tensor on a CPU. The optimizer's
states are made first, so that the step is one that comes after another.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...schema.errors import MeshwrightError, RuntimeMismatchError
from ...schema.training_plan import TrainingPlan
from .. import data_parallel
from ..mesh import ParallelMesh
from ..models.experts import MixtureOfExperts
from ..parallel_model import ParallelModel
from ..parallelize_model import parallelize
from ..training.optimizer import build_optimizer, take_step
from ..training.options import TrainOptions
from ..user_modules import LossFunction
from .kernels import gpu_kernels, gpu_workspace, host_workspace, joined_in_one, reduce_bucket
from .recorder import Log, Recorder
from .repetition import NotPeriodicError, repeat_passes
from .script import run_script
from .trace import OperatorSeconds, Trace, tensors_of

_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """What a rank is rehearsed with.

    Attributes:
        build: of the module to train, on the meta device; None: the plan's own model.
        loss_fn: of another module than the plan's.
        script: of the user, with its arguments; it builds the model and trains it.
        plan_path: the plan's file, for the script.
        is_worst: experts of this rank get every row that the layout lets them have; else their even share.
        copies: passes of micro-batches that are alike run once.
    """

    build: Callable[[], nn.Module] | None = None
    loss_fn: LossFunction | None = None
    script: tuple[str, ...] = ()
    plan_path: str = ""
    is_worst: bool = False
    copies: bool = True

    @property
    def is_user_model(self) -> bool:
        """Tell whether another module than the plan's model is trained."""
        return self.build is not None or bool(self.script)


class RehearsalError(RuntimeMismatchError):
    """A rank of the plan fails where it is rehearsed."""


def rehearse_rank(plan: TrainingPlan, rank: int, setting: Setting) -> Log:
    """Rehearse one step of one rank; passes that are alike run once (repetition.py), unless they turn out not to be.

    Raises:
        MeshwrightError: the plan cannot be executed.
        RehearsalError: a line of a module fails, or needs what a rehearsal does not have.
    """
    if setting.copies:
        with contextlib.suppress(NotPeriodicError):
            return _rehearse_rank(plan, rank, setting, copies=True)
    return _rehearse_rank(plan, rank, setting, copies=False)


def _rehearse_rank(plan: TrainingPlan, rank: int, setting: Setting, *, copies: bool) -> Log:
    """Rehearse one step of one rank.

    Raises:
        MeshwrightError: the plan cannot be executed.
        RehearsalError: a line of a module fails, or needs what a rehearsal does not have.
    """
    is_host = plan.cluster.weakest_device.backend.is_host
    if dist.is_initialized():
        raise RuntimeMismatchError("there is a torch.distributed job already: a rehearsal makes one of its own")
    show_traceback = sys.excepthook  # a job's says its rank before every line
    dist.init_process_group("fake", store=FakeStore(), rank=plan.rank_map[rank], world_size=plan.layout.world_size)
    axes: dict[str, list[str]] = {}
    recorder = Recorder(axes, host_workspace if is_host else gpu_workspace)
    trace = recorder.log.trace = None if setting.is_user_model else Trace(OperatorSeconds(plan))
    stack = contextlib.ExitStack()
    stack.enter_context(_quietly())

    def begin(mesh: ParallelMesh) -> None:
        for _ in (mesh.pipeline_ranks, mesh.tp, mesh.fsdp):  # slices of meshes cannot be made of fake tensors
            pass
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(recorder.without_trials())

    try:
        with (
            stack,
            joined_in_one(),
            contextlib.nullcontext() if trace is None else trace.watching(),
            contextlib.nullcontext() if is_host else gpu_kernels(recorder.note_norm),
        ):
            if setting.script:
                _run_script(plan, setting, rank, recorder, begin, axes, stack)
                return recorder.log
            module = None if setting.build is None else setting.build().to("meta")
            model = parallelize(module, plan, device=torch.device("cpu"), loss_fn=setting.loss_fn, on_split=begin)
            axes.update(_axes(model.mesh))
            _assume_rows(model, is_worst=setting.is_worst)
            _run_step(model, recorder, copies=copies)
            return recorder.log
    except (MeshwrightError, NotPeriodicError):
        raise
    except SystemExit as error:
        raise RehearsalError(f"{setting.script[0] if setting.script else 'torch'} ended with {error.code}") from None
    except Exception as error:
        if copies and _is_from(error, NotPeriodicError):  # torch's pipelining wraps what a stage raises
            raise NotPeriodicError from None
        raise _explained(error, plan, rank, recorder) from error
    finally:
        recorder.end_entries()
        dist.destroy_process_group()
        sys.excepthook = show_traceback
        _forget_meshes()
        gc.collect()


def _run_script(
    plan: TrainingPlan, setting: Setting, rank: int, recorder: Recorder, begin: Any, axes: dict[str, list[str]],
    stack: contextlib.ExitStack,
) -> None:  # fmt: skip
    def on_model(model: ParallelModel) -> None:
        axes.update(_axes(model.mesh))
        _assume_rows(model, is_worst=setting.is_worst)
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            recorder.mark(tensor, "parameters")
        stack.enter_context(recorder.watching(dict(model.module.named_modules())))
        model.clock.part = recorder.part  # type: ignore[method-assign, assignment]
        recorder.on_part_end = lambda: _mark(model, recorder)
        recorder.begin_phase("first step", "between")

    def on_update(optimizer: torch.optim.Optimizer) -> None:
        _mark_states(optimizer, recorder)
        recorder.log.messages.clear()  # of the last step only
        recorder.log.flops.clear()
        recorder.begin_phase("next step", "between")

    port, device = "29500", str(plan.rank_map[rank])
    environment = {
        "MESHWRIGHT_PLAN": setting.plan_path, "RANK": device, "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "WORLD_SIZE": str(plan.layout.world_size), "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port,
    }  # fmt: skip
    run_script(setting.script, environment, on_split=begin, on_model=on_model, on_update=on_update)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Let torch log nothing of what fails here, and DDP's hook end without a peer, while inside."""
    hook, level = data_parallel.allreduce_hook, logging.root.manager.disable
    data_parallel.allreduce_hook = reduce_bucket
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        data_parallel.allreduce_hook = hook
        logging.disable(level)


def _forget_meshes() -> None:
    """Clear what DTensor remembers by mesh: it holds the names of groups that are no more."""
    _clear_sharding_prop_cache()
    for cached in (_redistribute._gen_transform_infos, ShardingPropagator._propagate_tensor_meta_cached):
        cached.cache_clear()


def _run_step(model: ParallelModel, recorder: Recorder, *, copies: bool) -> None:
    for tensor in (*model.module.parameters(), *model.module.buffers()):
        recorder.mark(tensor, "parameters")
    with recorder.watching(dict(model.module.named_modules())):
        _run(model, recorder, copies=copies)


def _run(model: ParallelModel, recorder: Recorder, *, copies: bool) -> None:
    optimizer = build_optimizer(model, learning_rate=TrainOptions().learning_rate)
    recorder.begin_phase("initial optimizer states", "init")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    if model.plan.workload.has_backward:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _mark_states(optimizer, recorder)
    recorder.begin_phase("the batch", "between")
    tokens = torch.zeros(len(model.share.rows), model.plan.workload.seq_len + 1, dtype=torch.long)
    model.clock.part = recorder.part  # type: ignore[method-assign, assignment]
    recorder.log.messages.clear()
    recorder.log.flops.clear()
    recorder.on_part_end = lambda: _mark(model, recorder)
    if recorder.log.trace is not None:
        recorder.log.trace.start()
    if copies:
        repeat_passes(model, recorder)
    take_step(model, optimizer, tokens, max_grad_norm=TrainOptions().max_grad_norm)
    _mark(model, recorder)


def _mark_states(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                recorder.mark(value, "optimizer")


def _mark(model: ParallelModel, recorder: Recorder) -> None:
    """Say which storages are gradients and unsharded parameters, as they are between two passes."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.mark(parameter.grad, "gradients")
    for sharded in sharded_parameters(model.module):
        for tensor in getattr(sharded, "all_gather_outputs", ()):
            recorder.mark(tensor, "unsharded")
        recorder.mark(getattr(sharded, "unsharded_accumulated_grad", None), "gradients")
        unsharded = getattr(sharded, "_unsharded_param", None)
        if unsharded is not None:
            recorder.mark(unsharded.grad, "gradients")


def sharded_parameters(module: nn.Module) -> Iterator[Any]:
    """Iterate over FSDP's records of the parameters of all units within a module."""
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        state = fully_shard.state(unit)  # type: ignore[attr-defined]
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                yield from group.fsdp_params


def _axes(mesh: ParallelMesh) -> dict[str, list[str]]:
    """Return the axes of every process group of a rank, by its name; those of one rank are left out. Torch makes no group twice."""
    axes: dict[str, list[str]] = {}

    def add(group: dist.ProcessGroup | None, axis: str) -> None:
        if group is not None and group.size() > 1:
            axes.setdefault(group.group_name, []).append(axis)

    for device_mesh in filter(None, (mesh.device_mesh, mesh.pipelines, mesh.expert_mesh)):
        assert isinstance(device_mesh, DeviceMesh)
        for axis in device_mesh.mesh_dim_names or ():
            add(device_mesh.get_group(axis), axis)
    add(mesh.exchange, "cp")
    add(mesh.ring, "cp")
    add(mesh.tied_group, "pp")
    add(mesh.reshard.group if mesh.reshard is not None else None, "pp")
    add(dist.group.WORLD, "world")
    return axes


def _assume_rows(model: ParallelModel, *, is_worst: bool) -> None:
    """Let every rank's experts get the same number of rows, or this one's all that others may send."""
    for mixture in (one for one in model.module.modules() if isinstance(one, MixtureOfExperts)):
        group = None if mixture.ranks is None else mixture.ranks.exchange
        if group is None:
            continue
        spec, size = mixture.gate.spec, group.size()
        peak_share = min(spec.top_k, spec.num_experts // size) / spec.top_k

        def rows(count: int, size: int = size, peak_share: float = peak_share) -> tuple[list[int], list[int]]:
            even = [count // size + (rank < count % size) for rank in range(size)]
            return even, [round(count * peak_share)] * size if is_worst else even

        mixture.assumed_rows = rows


# Failures


def _is_from(error: BaseException | None, kind: type[Exception]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error is not None


def _explained(error: Exception, plan: TrainingPlan, rank: int, recorder: Recorder) -> RehearsalError:
    """Return what failed: the line of the module, the rank, and the operator with the shapes that it was given."""
    while isinstance(error.__cause__, Exception):  # torch's pipelining wraps what a stage raises
        error = error.__cause__
    stage = next((idx for idx, holder in enumerate(plan.rank_of_stage) if holder == rank // plan.layout.stage_ranks), 0)
    details = [f"rank {rank} of {plan.layout.world_size}, stage {stage}, in {recorder.log.phase_list[-1].name}"]
    if recorder.failed_module:
        details.append(f"module {recorder.failed_module}")
    if (line := _line_of(error.__traceback__)) is not None:
        details.append(line)
    if recorder.current is not None:
        func, args = recorder.current
        shapes = ", ".join(str(list(arg.shape)) for arg in tensors_of(args))
        details.append(f"{func} of {shapes}")
    text = str(error).strip().splitlines() or [type(error).__name__]
    return RehearsalError(
        f"this plan does not run: {type(error).__name__}: {text[0]}", details=tuple(details),
        help="mend the line or the plan; meshwright plan writes one that runs",
    )  # fmt: skip


def _line_of(trace: TracebackType | None) -> str | None:
    """Return the innermost line that is neither torch's nor the rehearsal's."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not Path(frame.filename).resolve().is_relative_to(_TORCH)
        and not Path(frame.filename).resolve().is_relative_to(_OURS / "rehearsal")
        and not frame.filename.startswith("<")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None
