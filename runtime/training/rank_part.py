"""What one rank makes of a plan: where it runs, its part of the model, of the data and of the optimizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ...schema import RuntimeMismatchError, TrainingPlan
from ..job.machine import check_device
from ..parallel_model import ParallelModel
from ..parallelize_model import parallelize
from .documents import DocumentBatches, open_documents
from .islands import IslandPlace, LocalUpdater
from .optimizer import build_optimizer
from .options import TrainOptions
from .samples import TokenBatches, open_batches

T = TypeVar("T")

Batches = TokenBatches | DocumentBatches


@dataclass(frozen=True)
class RankPart:
    """What one rank makes of a plan: its part of the model and of the data.

    Attributes:
        data: fingerprint of all data.
        sequences: that a step of the job takes of them; of all islands where these train by themselves.
        updates: of such a job what this rank does between the steps of its island.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    data: str
    sequences: int
    updates: LocalUpdater | None = None


def gather(value: T) -> list[T]:
    """Return one value of every rank, in the order of the processes."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def build_part(
    plan: TrainingPlan, options: TrainOptions, device: torch.device, place: IslandPlace | None = None
) -> RankPart:
    """Build this rank's part of a plan in the running process group; of an island with its part of each batch.

    Raises:
        RuntimeMismatchError: the ranks found different data.
    """
    model = parallelize(
        None, plan, device=device, seed=options.seed, weights=options.weights, compile_blocks=options.compile_blocks,
        documents=options.documents,
    )  # fmt: skip
    if options.robust_sum is not None:
        from ..robust_sum import apply_robust_sum

        apply_robust_sum(model, options.robust_sum)
    batches: Batches
    if options.documents:
        documents, data = open_documents(plan, options.data, seed=options.seed, end_id=options.end_id)
        batches = DocumentBatches(documents, model)
    else:
        first = 0 if place is None else place.first_row
        rows = range(first + model.share.rows.start, first + model.share.rows.stop)
        batches, data = open_batches(plan, options.data, seed=options.seed, rows=rows)
    if len(set(gather(data))) > 1:
        raise RuntimeMismatchError("the ranks found different data", help="give --data a folder that all nodes share")
    optimizer = build_optimizer(
        model, learning_rate=options.learning_rate, weight_decay=options.weight_decay, betas=options.betas,
        zeroth_order=options.zeroth_order,
    )  # fmt: skip
    sequences = plan.workload.global_batch_size if place is None else place.sequences
    return RankPart(model, optimizer, batches, data, sequences)


def backend_and_device(plan: TrainingPlan) -> tuple[str, torch.device]:
    """Return what the job's process group runs on, and this rank's device.

    Raises:
        RuntimeMismatchError: the device is not that of the plan.
    """
    cluster = plan.cluster
    backend: str = cluster.weakest_device.backend.collectives
    if backend == "gloo":
        return backend, torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    group = [group for group in cluster.groups for _ in range(group.num_devices)][int(os.environ["RANK"])]
    check_device(plan, group, device)
    torch.cuda.set_device(device)
    if plan.offload is not None and plan.offload.streamed_parameter_layers:
        backend = f"cpu:gloo,cuda:{backend}"  # those are reduced and counted on the host
    return backend, device
