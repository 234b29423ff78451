"""Show a serving plan: pools, latencies by class against the limits, what binds, the front, runner-ups; and its explanation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...schema.host_experts import experts_title
from ...schema.serving_plan import devices_title, layout_title, share_title
from ...schema.units import counted, format_bytes, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table, add_notes, add_search, figures_table, headed_table, model_title

if TYPE_CHECKING:
    from ...planner.explain.serving import ServingExplanation
    from ...schema.serving import Pool
    from ...schema.serving_plan import ClassEstimate, PoolEstimate, ServingPlan


def serving_tables(plan: ServingPlan) -> Iterator[Table]:
    """Yield the deployment, its classes where there are several, the front and the runner-ups."""
    yield serving_table(plan)
    if plan.estimate.classes:
        yield _classes(plan)
    if plan.front:
        yield _front(plan)
    if plan.alternatives:
        yield _alternatives(plan)


def serving_table(plan: ServingPlan) -> Table:
    """Show what a deployment gives, its latencies against the limits, its pools, and what was proved."""
    cost, serving = plan.estimate, plan.serving
    version = f" {serving.engine_version}" if serving.engine_version else ""
    table = figures_table(f"{model_title(plan.model, plan.cluster)}: serving with {serving.engine}{version}")
    rate = f"{cost.requests_per_s:.4g} requests/s; {_figure(cost.tokens_per_s_per_device)} tokens/s a device"
    table.add_row("[bold]throughput", f"[bold]{_figure(cost.tokens_per_s)}", "", f"tokens/s generated, {rate}")
    more = f"of {plan.cluster.num_devices}"
    if cost.usd_per_hour is not None:
        more += f"; {cost.usd_per_hour:,.2f} USD/h, {cost.usd_per_million_tokens:,.3g} USD per million tokens"
    table.add_row("[bold]devices", f"[bold]{plan.num_devices}", "", more)
    table.add_section()
    for limit in cost.limits:
        verdict = "[green]within[/]" if limit.is_met else "[red]beyond[/]"
        low, high = format_percent(limit.within_low), format_percent(limit.within_high)
        words = (
            f"{verdict} {format_seconds(limit.limit_s)} at p{100 * limit.quantile:g}; {low} to {high} of requests are"
        )
        table.add_row(
            f"[bold]{limit.metric}", f"[bold]{format_seconds(limit.simulated_s)}", format_percent(limit.within), words
        )
    for name in ("ttft", "tpot", "e2e"):
        times = getattr(cost.overall, name)
        words = f"p50; p90 {format_seconds(times.p90_s)}, p99 {format_seconds(times.p99_s)}, mean {format_seconds(times.mean_s)}"
        table.add_row(f"  {name}", format_seconds(times.p50_s), "", words)
    if cost.transfer_s:
        table.add_row("  transfer", format_seconds(cost.transfer_s), "", "of the keys and values of a mean prompt")
    for pool, of_pool in zip(plan.pools, cost.pools, strict=True):
        _add_pool(table, pool, of_pool)
    _add_fine_tuning(table, plan)
    _add_search(table, plan)
    add_notes(table, plan)
    return table


def _figure(value: float) -> str:
    """Return four digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _add_fine_tuning(table: Table, plan: ServingPlan) -> None:
    cost = plan.estimate.fine_tuning
    if cost is None:
        return
    table.add_section()
    for one in cost.pools:
        share = f"{one.tokens_per_step:,.0f} tokens of each step" if one.tokens_per_step else "the limits leave no room"
        words = f"tokens/s on {counted(one.replicas, 'instance')}; {share}"
        table.add_row("[bold]fine-tuning", f"[bold]{_figure(one.tokens_per_s)}", "", words)
    words = f"of a cluster without a load; {format_bytes(cost.state_bytes)} a device"
    table.add_row("  of the peak", "", format_percent(cost.share_of_peak, 0), words)
    spare = cost.pools[-1].replicas - cost.pools[0].replicas
    words = f"tokens/s on {counted(spare, 'instance')} that fine-tune alone, beside the plan's"
    table.add_row("  apart", f"{_figure(cost.apart_tokens_per_s)}", "", words)


def _add_pool(table: Table, pool: Pool, cost: PoolEstimate) -> None:
    table.add_section()
    name = {"agg": "instances", "prefill": "prefill", "decode": "decode"}[pool.role]
    limits = pool.limits
    layout = share_title(pool.prefill_eighths) + layout_title(pool.layout)
    table.add_row(f"[bold]{name}", f"[bold]{pool.replicas}", "", f"[bold]{layout}[/] on {plain(devices_title(pool))}")
    chunk = "" if limits.chunk is None else f", chunks of {limits.chunk:,}"
    steps = f"{limits.max_batch} requests, {limits.max_batched_tokens:,} tokens a step{chunk}"
    words = f"{steps}; {pool.weights} weights, {pool.cache} cache"
    if (drafting := pool.speculate) is not None:
        tokens = drafting.tokens_per_step(drafting.draft_tokens or 1)
        words += f"; drafts of {drafting.draft_tokens} by {drafting.method}, {tokens:.3g} tokens a step"
    if (adapters := pool.adapters) is not None:
        words += f"; {adapters.count:,} adapters of rank {adapters.rank}"
    if pool.nano_batch_rows is not None:
        words += f"; two nano-batches from {pool.nano_batch_rows:,} rows on"
    words += experts_title(pool.experts_on_host).replace(" with", ";")
    if pool.micro_batches is not None:
        words += f"; {counted(pool.micro_batches, 'micro-batch', 'micro-batches')} in flight"
    if pool.prefixes is not None:
        words += {
            "device": "; prefixes on the device", "host": "; prefixes in the host's memory",
            "storage": "; prefixes on the host's drives", "none": "; prefixes computed anew",
        }[pool.prefixes]  # fmt: skip
    table.add_row("  limits", "", "", words)
    usage = f"of {format_bytes(cost.cache_bytes)} a device in use by requests"
    cache = f"{usage}; weights {format_bytes(cost.weight_bytes)}"
    table.add_row("  cache", format_percent(cost.cache_use, 0), "", cache)
    rows, prompts = f"{cost.decode_rows:.3g} rows decode", f"{_figure(cost.prefill_tokens)} tokens of prompts"
    if cost.prefill_utilisation is None:
        table.add_row(
            "  step", format_seconds(cost.step_s), format_percent(cost.utilisation, 0), f"busy; {rows}, {prompts}"
        )
    else:
        step_s, busy = format_seconds(cost.prefill_step_s or 0.0), format_percent(cost.prefill_utilisation, 0)
        table.add_row("  prefill step", step_s, busy, f"busy; {prompts}")
        table.add_row(
            "  decode step", format_seconds(cost.step_s), format_percent(cost.utilisation, 0), f"busy; {rows}"
        )
    total = sum(cost.step_parts_s.values())
    for part, seconds in sorted(cost.step_parts_s.items(), key=lambda entry: -entry[1]):
        if seconds > 0.01 * total:
            share = seconds / total
            table.add_row(
                f"    {part.replace('_', ' ')}", format_seconds(seconds), format_percent(share, 0), share=share
            )
    if (split := cost.split) is not None:
        words = f"of a step attention devices are busy, feed-forward devices {format_percent(split.feed_forward, 0)}, the link "
        words += f"{format_percent(split.link, 0)}; weights of a feed-forward device {format_bytes(split.weight_bytes)}"
        table.add_row("  two groups", "", format_percent(split.attention, 0), words)
    if cost.binds == "rate":
        why = f"the load: {cost.requests_per_s:.3g} of the {cost.largest_requests_per_s:.3g} requests/s that an instance carries"
    else:
        why = f"{cost.binds}, at {cost.largest_requests_per_s:.3g} requests/s an instance"
    table.add_row("  binds", "", "", why)


def _add_search(table: Table, plan: ServingPlan) -> None:
    if (search := plan.search) is None:
        return
    bound, resource = search.bound, plan.resource_bound
    if search.unit == "s":
        limit, peaks = f"takes less than {format_seconds(bound)}", ""
    else:
        plural = "" if bound == 1 else "s"
        words = {"devices": f"needs fewer than {{}} device{plural}", "usd_per_hour": "costs less than {} USD/h"}
        limit = words.get(search.unit, "gives more than {} tokens/s a device").format(_figure(bound))
        peaks = "" if resource is None else f" (by peak rates alone: {_figure(resource)})"
    bound_text = f"; in this model none of this space {limit}{peaks}"
    add_search(table, search, f"{counted(search.evaluated, 'deployment')} simulated", bound_text)


def _classes(plan: ServingPlan) -> Table:
    table = headed_table(
        "classes of requests", "", "share", "prompt", "output", "ttft p50", "p90", "tpot p50", "p90", "within limits"
    )
    for idx, cost in enumerate(plan.estimate.classes):
        table.add_row(str(idx), *_class_row(cost))
    return table


def _class_row(cost: ClassEstimate) -> tuple[str, ...]:
    entry = cost.requests
    assert entry is not None
    times = (cost.ttft.p50_s, cost.ttft.p90_s, cost.tpot.p50_s, cost.tpot.p90_s)
    return (
        format_percent(entry.share), f"{entry.prompt_len:,}", f"{entry.output_len:,}", *map(format_seconds, times),
        format_percent(cost.attainment),
    )  # fmt: skip


def _front(plan: ServingPlan) -> Table:
    table = headed_table(
        "one user against one device: nothing of the space is better in both, by the steady state",
        "tokens/s a user", "tokens/s a device", "mode", "instances", text=("mode", "instances"), num_keys=0,
    )  # fmt: skip
    for point in plan.front:
        figures = (f"{_figure(point.tokens_per_s_per_user)}", f"{_figure(point.tokens_per_s_per_device)}")
        table.add_row(*figures, point.mode, plain(point.pools))
    return table


def _alternatives(plan: ServingPlan) -> Table:
    table = headed_table(
        "runner-ups", "pools", "devices", "requests/s", "tokens/s a device", "why not", text=("pools", "why not")
    )
    for other in plan.alternatives:
        table.add_row(
            plain(other.pools), str(other.num_devices), f"{other.requests_per_s:.3g}", f"{_figure(other.tokens_per_s_per_device)}",
            plain(other.reason),
        )  # fmt: skip
    return table


def explanation_tables(plan: ServingPlan, explanation: ServingExplanation) -> Iterator[Table]:
    """Yield what binds, and changes with what they give."""
    table = figures_table(f"{model_title(plan.model, plan.cluster)}: why this deployment", num_figures=0)
    for line in explanation.binds:
        table.add_row("[bold]binds", plain(line))
    yield table
    if explanation.not_searched:
        words = f"{', '.join(explanation.not_searched)}: the time limit ended before (--time-limit-s)"
        table.add_row("[bold]not searched", plain(words))
    changes = (explanation.why_not,) if explanation.why_not is not None else explanation.changes
    if not changes:
        return
    others = headed_table(
        "each change searched and simulated again", "change", "devices", "requests/s", "pools", "to the plan",
        text=("change", "pools", "to the plan"),
    )  # fmt: skip
    for change in changes:
        devices = "" if change.num_devices is None else str(change.num_devices)
        rate = "" if change.requests_per_s is None else f"{change.requests_per_s:.3g}"
        others.add_row(plain(change.change), devices, rate, plain(change.pools), plain(change.difference))
    yield others
