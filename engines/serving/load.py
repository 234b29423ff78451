"""The load of a serving plan as the command line of an engine's own load generator.

These draw prompts of one length, so each class has a command of its own, all at once, each with its share of the load.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from ...schema.serving import RequestClass
from ...schema.serving_plan import ServingPlan
from .deployment import Options, arguments, begin_script, entry_port

SECONDS = 120
"""That a load by rate lasts for."""

ROUNDS = 10
"""Requests for each one that is in flight."""


def load_script(
    plan: ServingPlan,
    engine: str,
    version: str,
    *,
    command: str,
    options: Callable[[RequestClass], Options],
    routed: bool,
    closed_option: str = "max-concurrency",
    rate_option: str = "request-rate",
    count_option: str = "num-prompts",
    has_burstiness: bool = False,
    url: str = "",
) -> str:
    """Return the script that sends the plan's load.

    Args:
        command: of the generator, in bash.
        options: of a class of requests: its lengths and what else the generator needs.
        routed: requests go to a router.
        has_burstiness: it takes the shape of a gamma distribution, 1 / cv^2.
        url: where requests go, in bash; by default the first node.
    """
    load, lines = plan.serving.requests, [begin_script(plan, engine, version, names_nodes=not url)]
    url = url or f'"http://${{HOSTS[0]}}:{entry_port(plan, routed=routed)}"'
    for entry in load.classes:
        flags: Options = {}
        if load.concurrency is not None:
            count = max(round(load.concurrency * entry.share), 1)
            flags |= {closed_option: count, count_option: ROUNDS * count}
        else:
            rate = (load.rate or plan.estimate.requests_per_s) * entry.share
            flags |= {rate_option: round(rate, 4), count_option: max(round(SECONDS * rate), 1)}
            if has_burstiness and load.arrival_cv > 0:
                flags["burstiness"] = round(load.arrival_cv**-2, 4)
        words = " ".join(map(shlex.quote, arguments(options(entry) | flags)))
        lines.append(f'{command} --model "$MODEL" {{URL}} {words} &\n'.replace("{URL}", f"{_URL_FLAG[engine]} {url}"))
    lines.append("wait\n")
    return "".join(lines)


_URL_FLAG = {"vllm": "--base-url", "sglang": "--base-url", "trtllm": "--base-url", "dynamo": "--url", "llm-d": "--url"}


def vllm_lengths(entry: RequestClass) -> Options:
    """Return a class as `vllm bench serve` takes it: the prefix comes before the prompt's other tokens."""
    return {
        "dataset-name": "random",
        "random-prefix-len": entry.prefix_len,
        "random-input-len": entry.prompt_len - entry.prefix_len,
        "random-output-len": entry.output_len,
        "random-range-ratio": 0,
        "ignore-eos": True,
        "percentile-metrics": "ttft,tpot,e2el",
        "metric-percentiles": "50,90,99",
    }


def aiperf_lengths(entry: RequestClass) -> Options:
    """Return a class as `aiperf profile` takes it."""
    return {
        "endpoint-type": "chat",
        "streaming": True,
        "synthetic-input-tokens-mean": entry.prompt_len,
        "synthetic-input-tokens-stddev": 0,
        "output-tokens-mean": entry.output_len,
        "output-tokens-stddev": 0,
        "extra-inputs": "ignore_eos:true",
    }
