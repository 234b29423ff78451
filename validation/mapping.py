"""Degrees and micro-batches that a row leaves out but that follow from what it states, or that its framework would take."""

from __future__ import annotations

import re
from dataclasses import replace

from .rows import RunRow

TOKENS_PER_PASS = 8192
"""Where nothing says how a rank's sequences are split into passes, a fully sharded rank takes as many as have this many tokens."""


def completed_mapping(row: RunRow) -> tuple[RunRow, tuple[str, ...]] | str:
    """The row with tp, pp, dp and micro_batch filled in, and which were assumed; or why they stay open."""
    num_devices = row.n_gpus
    if num_devices is None:
        return row, ()  # the cluster cannot be built either
    row = _mist_strategy(row)
    missing = [name for name in ("tp", "pp", "dp") if getattr(row, name) is None]
    assumed: list[str] = []
    if "tp" in missing and "pp" in missing and row.dp is None and num_devices > 1:
        return "mapping: tp, pp and dp not stated"
    degrees = {name: getattr(row, name) or 0 for name in ("tp", "pp", "dp")}
    known = (row.cp or 1) * max(degrees["tp"], 1) * max(degrees["pp"], 1) * max(degrees["dp"], 1)
    rest, left = divmod(num_devices, known)
    if left and missing:
        return "layout: degrees do not multiply to the number of devices"
    if len(missing) > 1:
        # The last open one takes what is left: data parallelism where that is open, else tensor parallelism.
        last = "dp" if "dp" in missing else "tp"
        for name in missing:
            if name != last:
                degrees[name] = 1
                assumed.append(f"{name}=1")
        degrees[last] = rest
    elif missing:
        degrees[missing[0]] = rest
    filled = replace(row, tp=degrees["tp"], pp=degrees["pp"], dp=degrees["dp"])
    if filled.micro_batch is None:
        filled = replace(filled, micro_batch=_micro_batch(filled))
        assumed.append("micro_batch" if filled.grad_accum else f"micro_batch={filled.micro_batch}")
    return filled, tuple(assumed)


def _micro_batch(row: RunRow) -> int:
    """Global / (dp * accumulation) where that is stated; one sequence for Megatron's engines; FSDP's as many as are worth it."""
    share = (row.global_batch or 0) // (row.dp or 1)
    if share < 1:
        return 1
    if row.grad_accum:
        return max(share // row.grad_accum, 1)
    if row.sharding_class not in ("zero3", "hybrid") or (row.pp or 1) > 1:
        return 1
    most = max(TOKENS_PER_PASS // (row.seq_len or TOKENS_PER_PASS), 1)
    return max(size for size in range(1, min(share, most) + 1) if share % size == 0)


def _mist_strategy(row: RunRow) -> RunRow:
    """What a plan whose stages are all alike says in its tuner's words: micro-batch, dp, tp, whether parameters, gradients and
    states are sharded, and four parts on the host: ``- - 1 - 2 - 1 - 0 - 0 - 1 - 0.0 ...``.
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
