"""What an endpoint measures, for /metrics (Prometheus' text format) and for the comparison with a plan."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from .requests import EngineStats

Metric = Literal["ttft", "tpot", "e2e", "queue"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e", "queue")
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
QUANTILES = (0.5, 0.9, 0.99)
_REMEMBERED = 100_000
"""Requests that percentiles are over: the last ones."""

Percentiles = Mapping[str, float]
"""mean, p50, p90, p99 in seconds."""


class Meter:
    """Counts of requests by outcome, and latencies of those that ended by themselves."""

    def __init__(self, planned: Mapping[Metric, Percentiles] | None = None) -> None:
        """Begin with what a plan predicts."""
        self.planned = planned or {}
        self.outcomes: Counter[str] = Counter()
        self.prompt_tokens = self.output_tokens = 0
        self._values: dict[Metric, deque[float]] = {name: deque(maxlen=_REMEMBERED) for name in METRICS}
        self._buckets: dict[Metric, list[int]] = {name: [0] * (len(BUCKETS_S) + 1) for name in METRICS}
        self._sums: dict[Metric, float] = dict.fromkeys(METRICS, 0.0)

    def ended(
        self,
        outcome: str,
        *,
        prompt_tokens: int = 0,
        times: Sequence[float] = (),
        arrived_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """Count a request, with the times of its first and last token and how many there were; latencies where it was served."""
        self.outcomes[outcome] += 1
        self.prompt_tokens += prompt_tokens
        if not times:
            return
        first_s, last_s, count = times
        self.output_tokens += int(count)
        if outcome != "served":
            return
        self._add("ttft", first_s - arrived_s)
        self._add("e2e", last_s - arrived_s)
        self._add("queue", queue_s)
        if count > 1:
            self._add("tpot", (last_s - first_s) / (count - 1))

    def _add(self, metric: Metric, seconds: float) -> None:
        self._values[metric].append(seconds)
        self._buckets[metric][bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._sums[metric] += seconds

    def percentiles(self, metric: Metric) -> dict[str, float]:
        """Return the mean and percentiles of the last requests; empty before the first."""
        values = sorted(self._values[metric])
        if not values:
            return {}
        quantiles = {f"p{100 * share:g}": values[min(int(share * len(values)), len(values) - 1)] for share in QUANTILES}
        return {"mean": sum(values) / len(values), **quantiles}

    def exposition(self, model: str, stats: EngineStats, open_requests: int) -> str:
        """Return all in Prometheus' text format."""
        return "\n".join(self._lines(_label(model), stats, open_requests)) + "\n"

    def _lines(self, model: str, stats: EngineStats, open_requests: int) -> Iterator[str]:
        labels = f'model_name="{model}"'
        yield "# TYPE meshwright_requests_total counter"
        for outcome in ("served", "cancelled", "refused", "failed"):
            yield f'meshwright_requests_total{{{labels},outcome="{outcome}"}} {self.outcomes[outcome]}'
        counters = {
            "prompt_tokens_total": self.prompt_tokens,
            "generated_tokens_total": self.output_tokens,
            "steps_total": stats.steps,
            "preemptions_total": stats.preemptions,
        }
        gauges = {
            "requests_open": open_requests,
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "cache_blocks": stats.total_blocks,
            "cache_blocks_used": stats.used_blocks,
        }
        for kind, values in (("counter", counters), ("gauge", gauges)):
            for name, value in values.items():
                yield f"# TYPE meshwright_{name} {kind}"
                yield f"meshwright_{name}{{{labels}}} {value}"
        for metric in METRICS:
            name, total = f"meshwright_{metric}_seconds", 0
            yield f"# TYPE {name} histogram"
            for limit, count in zip((*map(str, BUCKETS_S), "+Inf"), self._buckets[metric], strict=True):
                total += count
                yield f'{name}_bucket{{{labels},le="{limit}"}} {total}'
            yield f"{name}_sum{{{labels}}} {self._sums[metric]:.9g}"
            yield f"{name}_count{{{labels}}} {total}"
        for metric, planned in self.planned.items():
            yield f"# TYPE meshwright_plan_{metric}_seconds gauge"
            for share in QUANTILES:
                yield f'meshwright_plan_{metric}_seconds{{{labels},quantile="{share:g}"}} {planned[f"p{100 * share:g}"]:.9g}'


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
