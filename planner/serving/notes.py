"""Notes of a serving plan: what was assumed, where things lie, and how far the estimate is to be trusted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...cost_models.coefficients import packaged_coefficients
from ...cost_models.hardware.host_memory import host_weight_rates
from ...cost_models.serving.host_experts import resident_hits
from ...cost_models.serving.shares import EIGHTHS
from ...schema.serving_plan import layout_title
from ...schema.units import GB, counted, format_bytes, format_percent, format_seconds
from ..request import PlanRequest
from ..tasks.serving import ServingProblem
from .checks import MAX_CV, Served


def notes_of(request: PlanRequest, problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield what a reader of the plan should know beside its figures."""
    requests = problem.serving.requests
    if problem.serving.objective == "throughput" and requests.rate is not None:
        yield "a rate is given: most tokens a second and device are those of the fewest devices"
    if not problem.serving.limits:
        yield "no limit on latency is given: requests may wait as long as the load lets them (--ttft, --tpot)"
    if requests.trace is not None and requests.concurrency is None:
        yield (
            f"lengths are drawn from the {requests.trace.num_requests:,} requests of {requests.trace.path}, arrivals with their "
            f"variation (cv {requests.arrival_cv:.2g}); meshwright replay serves them as recorded"
        )
    if requests.concurrency is None and requests.arrival_cv > MAX_CV:
        yield f"arrivals are drawn with cv {MAX_CV:g}, so that bursts are milder than those of cv {requests.arrival_cv:.2g}"
    yield from _on_measured(problem, served)
    if served.deployment.routes is not None:
        yield "classes go to instances of their own; the bound on such mixes takes their seconds to add up (E2)"
    if (drafting := served.deployment.kinds[-1].speculate) is not None:
        tokens = drafting.tokens_per_step(drafting.draft_tokens or 1)
        yield f"a step gives {tokens:.3g} tokens of a draft of {drafting.draft_tokens}: as was asked for, not measured here"
    elif problem.serving.speculate is not None:
        yield "no tokens are drafted: under this load a step of more rows costs more than the accepted tokens save"
    if (adapters := problem.serving.adapters) is not None:
        yield (
            f"the {adapters.count:,} adapters of rank {adapters.rank} are all in the devices' memory; none is fetched from the host"
        )
    yield from _on_prefixes(problem, served)
    yield from _on_experts(problem, served)
    if (shared := served.deployment.kinds[0].shared) is not None:
        yield (
            f"prompts have {shared.prefill_eighths} of {EIGHTHS} parts of the multiprocessors at any time, rows that decode the "
            "others; what both draw of the bandwidth is shared between them"
        )
    if served.deployment.is_disaggregated:
        yield "keys and values of a prompt are sent when it ends, over the outermost link; the first token waits for them"
    if served.deployment.mode == "afd":
        yield (
            f"no release of {problem.serving.engine} has attention and feed-forward parts on devices of their own: its scheduler "
            "and overheads are taken as they are, and nothing exports or runs this plan"
        )
    yield from _on_steps(problem, served)
    if problem.space.too_large:
        yield f"{counted(len(problem.space.too_large), 'layout')} of an instance do not fit the memory of a device"


def _on_measured(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield how likely a limit on TPOT holds when it is measured, by how far predictions of load tests were off."""
    if problem.serving.engine == "meshwright":
        return
    if any(kind.experts_on_host is not None for kind in served.deployment.kinds):
        yield "steps with experts on the host are compared with one engine's published rates, not with load tests (docs/serving.md)"
        return
    ratios = packaged_coefficients().value("serving.measured_over_predicted.tpot")
    levels = np.arange(1, len(ratios) + 1) / (len(ratios) + 1)
    for limit in served.limits:
        if limit.metric == "tpot" and limit.simulated_s:
            ratio = limit.limit_s / limit.simulated_s
            share = format_percent(float(np.interp(ratio, ratios, levels)), 0)
            yield (
                f"tpot is predicted as {format_seconds(limit.simulated_s)}, {ratio:.2f} times which is the limit: {share} of the "
                "load tests that were predicted measured no more than that (a tighter --tpot is safer)"
            )


def _on_prefixes(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield where the prefixes of the load lie, and what that takes."""
    kind, stored = served.deployment.kinds[0], problem.serving.requests.stored_tokens
    if kind.prefixes == "device":
        share = stored / (kind.limits.cache_blocks * kind.limits.block_size)
        yield f"prefixes of {stored:,} tokens lie in every instance's cache, {format_percent(share)} of it"
    elif kind.prefixes == "none":
        yield f"prefixes of {stored:,} tokens are computed with every prompt: no place for them serves the load better"
    elif kind.prefixes is not None:
        seconds = kind.model.fetch_s_per_token * float(problem.mix.share @ problem.mix.prefix_len)
        size = format_bytes(kind.size * kind.pool("agg", 1).host_prefix_bytes)
        where = "the host's memory" if kind.prefixes == "host" else "the host's drives"
        if kind.prefixes == "host" and any(
            group.host_memory_bytes is None for group in kind.step.instance.cluster.groups
        ):
            where += " (how much it has the cluster does not say)"
        yield (
            f"prefixes of {stored:,} tokens lie in {where}, {size} an instance; a request copies its own in "
            f"{format_seconds(seconds)}"
        )


def _on_experts(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield which experts lie with the host, what that takes there, and how often rows meet the others."""
    if problem.serving.experts_on_host is None:
        return
    for kind in dict.fromkeys(served.deployment.kinds):
        placed = kind.experts_on_host
        if placed is None or placed.share is None:
            yield f"all experts are on the devices of {layout_title(kind.layout)}: none with the host serve the load better"
            continue
        instance = kind.step.instance
        hits = resident_hits(placed.share, float(instance.coefficients["serving"]["popularity_cv"]))
        groups = instance.cluster.groups
        size = format_bytes(kind.size * kind.step.host_weight_bytes)
        known = (
            "" if all(group.host_memory_bytes for group in groups) else " (how much it has the cluster does not say)"
        )
        met = f"of the rows {format_percent(hits)} meet the others, by the usual spread of loads"
        yield (
            f"{format_percent(placed.share)} of each layer's experts, the least visited, lie in the host's memory, {size} an "
            f"instance{known}; {met}"
            if placed.share < 1
            else f"all routed experts lie in the host's memory, {size} an instance{known}"
        )
        is_known = all(group.host_bandwidth_bytes_per_s and group.host_flops_per_s for group in groups)
        if placed.by != "copy" and not is_known:
            rates = host_weight_rates(instance.cluster, instance.coefficients)
            read, computed = (rate * instance.cluster.largest_node for rate in rates)
            yield (
                f"the host's processors are taken to read {read / GB:.4g} GB/s of weights and to compute {computed / 1e12:.3g} "
                "TFLOP/s a node, as is usual beside such links: host_bandwidth_bytes_per_s and host_flops_per_s of a cluster "
                "file say others"
            )


def _on_steps(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield where the seconds of steps come from, of our own engine."""
    devices, unmeasured = served.deployment.num_devices, problem.space.unmeasured
    for kind in served.deployment.kinds:
        if kind.measured is not None:
            fit = kind.measured.steps(devices)
            yield (
                f"steps of {layout_title(kind.layout)} are measured on this machine's engine: {fit.num_measured} of them, "
                f"{format_percent(fit.error)} from their fit in the mean"
            )
    if unmeasured:
        yield f"not measured, and not planned: {', '.join(map(layout_title, unmeasured))}"
    if problem.serving.engine == "meshwright" and served.deployment.kinds[0].measured is None:
        yield "steps are computed: meshwright profile --model MODEL --serve measures those of this machine"
