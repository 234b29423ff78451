"""Training on documents in mixed groups against padding and against the best fixed cp, and predicted against measured steps.

python benchmarks/documents.py --out benchmarks/documents.json            # needs ../shared/data; some twenty minutes

A small decoder on gloo ranks (ZeRO-3), batches of lengths of code files. Every way computes the same batches by `backward_batch`:
ours; every sequence padded to the longest of its batch; fixed degrees cp = 1, 2, .. of which the best counts, each scheduled by the
same solver with groups of that size only. Measured is the critical path in CPU seconds: of each micro-batch the seconds of the rank
that computes longest, since ranks wait for each other there (waiting takes no CPU), which other work disturbs little; less what
gloo's threads take of every second of the clock to look for messages, measured while nothing is sent. Wall seconds are reported
beside it. Predictions are of the plan's costs after `meshwright profile --documents --cpu-seconds`, which measures the layers of
this decoder by the same seconds on as many ranks. Between batches the ranks measure a block as the profile does: how much slower
the machine is by then (`block_over_profile`) is no error of the prediction.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from meshwright.planner import plan as make_plan
from meshwright.planner.batch import length_costs
from meshwright.profilers.machine import cpu_rank_environment
from meshwright.profilers.profiled_cluster import profiled_cluster
from meshwright.schema import ModelSpec, Profile, TrainingPlan, Workload
from meshwright.schema.batch import LengthCosts, Lengths
from meshwright.solvers.batch_groups import BatchGroup, BatchInstance, schedule_batch

DATA = Path(__file__).parents[1] / "../shared/data/variable_length/code_files.txt.gz"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 8192, "hidden_act": "silu",
}  # fmt: skip
MAX_LEN, BATCH, TOKENS_PER_RANK = 4096, 12, 4096

Schedule = tuple[tuple[BatchGroup, ...], ...]


def main() -> None:
    """Measure on 2 and 4 ranks; print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", type=int, default=20, help="of ours, on 2 ranks")
    parser.add_argument("--compared", type=int, default=6, help="that the others compute too, at least one")
    parser.add_argument(
        "--tokens-per-rank", type=int, default=TOKENS_PER_RANK, help="below 4,096 the longest need groups"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    with gzip.open(DATA, "rt") as file:
        lengths = Lengths.of([int(line) for line in file], max_len=MAX_LEN)
    results = {}
    for ranks in options.ranks:
        plan = _plan(ranks, lengths, options.tokens_per_rank)
        assert plan.batches is not None
        batches = [lengths.draw(BATCH, 100 + idx) for idx in range(options.batches)]
        work = [
            (name, batch_idx, schedule, padded)
            for batch_idx, batch in enumerate(batches)
            for name, schedule, padded in _ways(plan.batches, batch, compares=batch_idx < options.compared)
        ]
        measured = _run(plan, batches, work)
        results[f"{ranks} ranks, {options.tokens_per_rank} tokens on each"] = _summary(
            plan.batches, batches, work, measured
        )
        print(json.dumps(results, indent=1), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


def _plan(ranks: int, lengths: Lengths, tokens_per_rank: int) -> TrainingPlan:
    with tempfile.TemporaryDirectory() as folder:
        path, profile = Path(folder) / "config.json", Path(folder) / "profile.json"
        path.write_text(json.dumps(CONFIG))
        model = ModelSpec.resolve(str(path))
        command = [
            sys.executable, "-m", "meshwright.cli", "profile", "--model", str(path), "--seq-len", str(MAX_LEN), "--documents",
            "--cpu-seconds", "--ranks", str(ranks), "--parts", "compute,layers,links", "--budget-s", "150", "--out", str(profile),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        cluster = profiled_cluster(Profile.load(profile))
    workload = Workload(seq_len=MAX_LEN, global_batch_size=BATCH, precision="fp32")
    fixed = {"dp_shard": ranks, "zero_stage": 3, "recompute": "none", "micro_batch_size": 1}
    plan = make_plan(model, cluster, workload, fixed=fixed)
    assert isinstance(plan, TrainingPlan)
    mixed = workload.replace(lengths=lengths)
    costs = length_costs(
        model,
        cluster,
        mixed,
        plan.layout,
        shortest=lengths.lengths[0],
        longest=MAX_LEN,
        tokens_per_rank=tokens_per_rank,
    )
    return plan.replace(batches=costs)


def _ways(costs: LengthCosts, batch: tuple[int, ...], *, compares: bool) -> list[tuple[str, Schedule, bool]]:
    """Return name, schedule and whether it is of padded sequences, for each way to compute a batch."""
    ways = [("ours", schedule_batch(BatchInstance.under(costs, batch)).micro_batches, False)]
    if not compares:
        return ways
    padded = (max(batch),) * len(batch)
    for degree in (2**idx for idx in range(len(costs.token_s))):
        if costs.tokens_per_rank * degree < max(batch):
            continue
        ways += [
            (f"{name}, cp {degree}", _fixed(costs, lengths, degree), name == "padded")
            for name, lengths in (("fixed", batch), ("padded", padded))
        ]
    return ways


def _fixed(costs: LengthCosts, lengths: tuple[int, ...], degree: int) -> Schedule:
    """Return the schedule whose groups all have ``degree`` ranks."""
    instance = BatchInstance.of(
        lengths, lambda given, _: costs.seconds(given, degree), num_ranks=costs.num_ranks // degree, max_degree=1,
        tokens_per_rank=costs.tokens_per_rank * degree, fixed_s=costs.fixed_s,
    )  # fmt: skip
    answer = schedule_batch(instance).micro_batches
    return tuple(tuple(replace(g, first=g.first * degree, size=degree) for g in groups) for groups in answer)


def _run(plan: TrainingPlan, batches: list[tuple[int, ...]], work: list[Any]) -> list[list[dict[str, Any]]]:
    """Return what every rank measured, by rank and piece of work."""
    os.environ.update(cpu_rank_environment(), OMP_NUM_THREADS="1")
    context, ranks = mp.get_context("spawn"), plan.layout.world_size
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        (Path(folder) / "work.json").write_text(
            json.dumps([[n, b, [[list(vars(g).values()) for g in m] for m in s], p] for n, b, s, p in work])
        )
        (Path(folder) / "batches.json").write_text(json.dumps(batches))
        processes = [context.Process(target=_rank, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert not any(process.exitcode for process in processes)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from meshwright.runtime import parallelize
    from meshwright.runtime.documents.packs import Batch

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(hours=1)
    )
    plan = TrainingPlan.load(Path(folder) / "plan.json")
    model = parallelize(None, plan, device=torch.device("cpu"), documents=True)
    assert model.documents is not None
    marks: list[tuple[float, float]] = []
    enter = model.documents.enter

    def mark() -> None:
        marks.append((time.process_time(), time.perf_counter()))

    def marked(pack: Any) -> None:
        mark()
        enter(pack)

    model.documents.enter = marked  # type: ignore[method-assign]
    batches = json.loads((Path(folder) / "batches.json").read_text())
    measured = []
    work = json.loads((Path(folder) / "work.json").read_text())
    block, looking = _BlockOfProfile(plan), 0.0
    for number, (name, batch_idx, schedule, is_padded) in enumerate(
        [work[0], *work]
    ):  # the first one twice: to warm up
        lengths = batches[batch_idx]
        lengths = [max(lengths)] * len(lengths) if is_padded else lengths
        groups = [
            [BatchGroup(first, size, tuple(sequences), seconds) for first, size, sequences, seconds in row]
            for row in schedule
        ]
        tokens = torch.randint(0, 1024, (sum(lengths),), generator=torch.Generator().manual_seed(batch_idx))
        prepared = model.prepare_batch(Batch.of(tokens, np.cumsum(lengths).tolist(), groups))
        dist.barrier()
        marks.clear()
        start_s = time.perf_counter()
        model.add_over_ranks(model.backward_batch(prepared))
        wall_s = time.perf_counter() - start_s
        mark()
        cpu_s, clock_s = np.diff(marks, axis=0).T
        ratio = block.over_profile() if number % 5 == 1 else None
        measured.append(
            {
                "name": name,
                "batch": batch_idx,
                "wall_s": wall_s,
                "cpu_s": (cpu_s - looking * clock_s).tolist(),
                "block": ratio,
            }
        )
        looking = looking or _cpu_while_idle()  # now that all groups are connected
        for parameter in model.parameters():
            parameter.grad = None
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measured[1:]))
    dist.barrier()
    os._exit(0)


def _cpu_while_idle() -> float:
    """Return the CPU seconds that this process takes in a second of the clock in which it does nothing."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    time.sleep(3)
    return (time.process_time() - cpu_s) / (time.perf_counter() - start_s)


class _BlockOfProfile:
    """A block over one sequence of the longest, as the profile measured it."""

    def __init__(self, plan: TrainingPlan) -> None:
        import torch
        from meshwright.profilers.measure.timing import Bench
        from meshwright.profilers.model_steps import LayerCase, build_layer
        from meshwright.runtime.recompute import build_standalone

        block, device = plan.model.block_runs[0][0], torch.device("cpu")
        assert plan.cluster.profile is not None
        self._profiled_s = sum(
            point.time_s
            for point in plan.cluster.profile.layers
            if point.layer == block and point.recompute == "none"
            and (point.micro_batch_size, point.seq_len, point.tp) == (1, MAX_LEN, 1)
        )  # fmt: skip
        self._bench = Bench(device, 0.1, sample_clock=time.process_time)
        case = LayerCase(plan.model, block, 1, MAX_LEN, 1, "fp32", "none")
        self._module, inputs = build_layer(build_standalone, case, device)
        self._inputs = inputs()

    def over_profile(self) -> float:
        """Return what it takes now, forward and backward, over the profile's seconds."""
        from meshwright.profilers.measure.kernels import measure_passes

        return (
            sum(timing.time_s for timing in measure_passes(self._bench, self._module, self._inputs)) / self._profiled_s
        )


def _summary(
    costs: LengthCosts, batches: list[tuple[int, ...]], work: list[Any], measured: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    seconds: dict[str, dict[int, float]] = {}
    walls: dict[str, dict[int, float]] = {}
    for entries in zip(*measured, strict=True):
        name, batch = entries[0]["name"], entries[0]["batch"]
        seconds.setdefault(name, {})[batch] = float(np.max([entry["cpu_s"] for entry in entries], axis=0).sum())
        walls.setdefault(name, {})[batch] = max(entry["wall_s"] for entry in entries)
    compared = [batch for batch in seconds["ours"] if all(batch in each for each in seconds.values())]

    def rate(table: dict[str, dict[int, float]], name: str) -> float:
        return sum(sum(batches[batch]) for batch in compared) / sum(table[name][batch] for batch in compared)

    rates = {name: rate(seconds, name) for name in seconds}
    others = {
        kind: max(value for name, value in rates.items() if name.startswith(kind)) for kind in ("padded", "fixed")
    }
    predicted = [
        costs.step_s + sum(costs.fixed_s + max(group.seconds for group in groups) for groups in schedule)
        for name, _, schedule, _ in work
        if name == "ours"
    ]
    real = [seconds["ours"][idx] for idx in range(len(batches))]
    blocks = [entry["block"] for entries in measured for entry in entries if entry["block"] is not None]
    ratio = np.array(real) / np.array(predicted)
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, real)]
    return {
        "batches": len(batches),
        "compared": len(compared),
        "tokens_per_cpu_s": {name: round(value, 1) for name, value in rates.items()},
        "tokens_per_wall_s": {name: round(rate(walls, name), 1) for name in walls},
        "over_padding_to_the_longest": round(rates["ours"] / others["padded"], 3),
        "over_best_fixed_cp": round(rates["ours"] / others["fixed"], 3),
        "predicted_s": np.round(predicted, 3).tolist(),
        "measured_s": np.round(real, 3).tolist(),
        "median_measured_over_predicted": round(float(np.median(ratio)), 3),
        "median_error": round(float(np.median(abs(ratio - 1))), 3),
        "block_over_profile": round(float(np.median(blocks)), 3),
        "median_error_but_for_one_factor": round(float(np.median(abs(ratio / np.median(ratio) - 1))), 3),
        "rank_correlation": round(float(np.corrcoef(*ranks)[0, 1]), 3),
    }


if __name__ == "__main__":
    main()
