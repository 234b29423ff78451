"""The processes of a post-training job: a default group for each pool, and a group of all of them for samples and weights.

Each pool is a job of torch.distributed of its own, so that a plan for its devices runs there as it runs anywhere. All processes
of all pools are members of one more gloo group, whose messages are numbers: what a pool knows, every process is told.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.rl_plan import RlPlan


class Circle:
    """Processes that share numbers.

    Attributes:
        position, size: this process's number among them, and how many there are.
    """

    def __init__(self, position: int, size: int, group: Any) -> None:
        """Share over a group of gloo's, which may be None where there is one process."""
        self.position, self.size, self._group = position, size, group

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return one row of numbers of every process, of any lengths; all give the same type."""
        if self.size == 1:
            return [values]
        lengths = self._gather(torch.tensor([len(values)]))
        longest = max(int(length) for length in lengths)
        padded = values.new_zeros(longest)
        padded[: len(values)] = values
        rows = self._gather(padded) if longest else [padded] * self.size
        return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, values: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(values) for _ in range(self.size)]
        self._group.allgather([rows], [values]).wait()
        return rows

    def share_rows(self, rows: Sequence[tuple[int, Sequence[float]]]) -> dict[int, list[float]]:
        """Return the rows of numbers of all processes, by number of their sample."""
        flat = [x for number, row in rows for x in (float(number), float(len(row)), *map(float, row))]
        shared: dict[int, list[float]] = {}
        for part in self.gather(torch.tensor(flat, dtype=torch.float64)):
            words, place = part.tolist(), 0
            while place < len(words):
                number, count = int(words[place]), int(words[place + 1])
                shared[number] = words[place + 2 : place + 2 + count]
                place += 2 + count
        return dict(sorted(shared.items()))


class Everyone(Circle):
    """A process among all of the job's; what `Exchange` asks of the members of a job.

    Attributes:
        pool: index of its pool.
    """

    def __init__(self, plan: RlPlan, timeout_s: float) -> None:
        """Join the job that the environment describes, and the default group of this process's pool."""
        position, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout = timedelta(seconds=timeout_s)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store: Any = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
        starts = pool_starts(plan)
        self.pool = max(idx for idx, start in enumerate(starts) if start <= position)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"pool-{self.pool}", self.store), rank=position - starts[self.pool],
            world_size=plan.pools[self.pool].num_devices, timeout=self._timeout,
        )  # fmt: skip
        super().__init__(position, size, self.group("everyone", position, size))

    def group(self, name: str, position: int, size: int) -> Any:
        """Return a further group of gloo's."""
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), position, size, self._timeout)

    def without(self, pool: int, starts: Sequence[int]) -> Circle | None:
        """Return the circle of all processes but those of a pool; None for these."""
        end = starts[pool + 1] if pool + 1 < len(starts) else self.size
        others = [idx for idx in range(self.size) if not starts[pool] <= idx < end]
        if self.position not in others:
            return None
        position = others.index(self.position)
        return Circle(position, len(others), self.group("others", position, len(others)))


def pool_starts(plan: RlPlan) -> list[int]:
    """Return the first process of each pool: processes are counted pool by pool."""
    starts = [0]
    for pool in plan.pools[:-1]:
        starts.append(starts[-1] + pool.num_devices)
    return starts
