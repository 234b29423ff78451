"""Plans on clusters of several kinds of devices, and mixtures of offers: CPU seconds, gaps, and a search of every mixture.

    python benchmarks/mixtures.py clusters        128, 320 and 512 devices, A100 and V100
    python benchmarks/mixtures.py offers          three offers of 64 nodes, under deadlines
    python benchmarks/mixtures.py every           three offers of 8 nodes against a search of each of their mixtures (an hour)

Prices are examples. Each part prints its table; seconds are of one process.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

from meshwright.planner import cheapest, plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import search
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, InfeasibleError, ModelSpec, Offer, Workload
from meshwright.schema.offers import mixture

KINDS = {"H100-SXM-80GB": 3.0, "A100-SXM-80GB": 1.6, "A100-SXM-40GB": 1.2}
DEADLINES = ((1e11, 72.0), (1e12, 100.0), (1e12, 70.0))
LIMIT_S = 3600.0


def offers(num_nodes: int) -> tuple[Offer, ...]:
    """Return offers of so many nodes of each kind."""
    return tuple(
        Offer.from_cluster(ClusterSpec.parse(f"{num_nodes}x8x{kind}"), name=kind, price_per_device_hour=price)
        for kind, price in KINDS.items()
    )


def clusters() -> None:
    """Plan an 8 B model on three mixed clusters."""
    for a100, v100 in ((4, 12), (10, 30), (16, 48)):
        pools = (ClusterSpec.parse(f"{a100}x8xA100-SXM-40GB"), ClusterSpec.parse(f"{v100}x8xV100-SXM2-16GB"))
        cluster = mixture([Offer.from_cluster(pool) for pool in pools], (a100, v100))
        start = time.process_time()
        answer = plan(
            "llama-3.1-8b",
            cluster,
            Workload(global_batch_size=1024, seq_len=2048, precision="fp16-mixed"),
            time_limit_s=LIMIT_S,
        )
        took, proof = time.process_time() - start, answer.search
        assert proof is not None
        print(f"{cluster.num_devices}: {took:.1f} s, {answer.estimate.step_time_s:.3f} s a step, gap {proof.gap:.1%}")


def under_deadlines(num_nodes: int) -> None:
    """Rent up to three offers together, and one alone, under each deadline."""
    model, workload = ModelSpec.named("llama-3.1-8b"), Workload(global_batch_size=1024, seq_len=4096)
    for (tokens, hours), mix in itertools.product(DEADLINES, (1, 3)):
        start = time.process_time()
        try:
            cost = cheapest(
                model,
                offers(num_nodes),
                workload,
                tokens=tokens,
                deadline_s=3600 * hours,
                mix=mix,
                time_limit_s=LIMIT_S,
            ).cost
        except InfeasibleError as error:
            print(f"{tokens:.0e} in {hours:g} h, mix {mix}: {error}")
            continue
        assert cost is not None
        took = time.process_time() - start
        usd = cost.usd_per_billion_tokens
        print(
            f"{tokens:.0e} in {hours:g} h, mix {mix}: {cost.offer}, {usd:.2f} USD/1e9, gap {cost.gap:.1%}, {took:.1f} s"
        )


def every() -> None:
    """Compare with a search of every size and mixture of three offers of 8 nodes."""
    model, workload = ModelSpec.named("gpt2"), Workload(global_batch_size=64, seq_len=1024)
    rented, steps = offers(8), dict[tuple[int, ...], tuple[float, float]]()
    for counts in itertools.product(range(9), repeat=3):
        if any(counts):
            alone = sum(n > 0 for n in counts) == 1
            o = max(range(3), key=lambda each: counts[each])
            cluster = rented[o].with_size(counts[o]) if alone else mixture(rented, counts)
            request = PlanRequest.create(model, cluster, workload, time_limit_s=LIMIT_S)
            found = search(request, build_space(request)).feasible
            if found:
                steps[counts] = found[0].step_time_s, (cluster.price_per_hour or 0.0) / 3600 * found[0].step_time_s
    fastest = min(step_s for step_s, _ in steps.values())
    for part in (0.3, 0.6, 0.9, 0.99):
        best = min(usd for step_s, usd in steps.values() if step_s <= fastest / part)
        floor = part * workload.tokens_per_step / fastest
        made = cheapest(model, rented, workload, min_tokens_per_s=floor, mix=3, prefer="fastest", time_limit_s=LIMIT_S)
        assert made.cost is not None and made.cost.usd_per_step is not None
        print(f"{part:.0%} of the fastest: {made.cost.offer}, {made.cost.usd_per_step / best - 1:+.3%} of the best")


PARTS: dict[str, Callable[[], None]] = {"clusters": clusters, "offers": lambda: under_deadlines(64), "every": every}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    PARTS[parser.parse_args().part]()
