"""What is asked of a deployment, in options: the load, limits on latency, types of weights and caches, modes."""

from __future__ import annotations

from typing import Literal

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.serving import (
    MODES,
    CacheDtype,
    LatencyLimit,
    SchedulerPolicy,
    Serving,
    ServingEngine,
    ServingObjective,
    WeightDtype,
)
from .options import OptionModel, option


class ServingOptions(OptionModel):
    """A load and its limits."""

    requests: str = option(
        ..., "isl=4096,osl=512[,rate=20][,cv=1.5][,prefix=0.4], several classes apart by ;, or a trace: a csv or csv.gz with "
        "columns arrival_s, prompt_tokens, output_tokens.",
        metavar="LOAD",
    )  # fmt: skip
    ttft: str | None = option(None, "limit on the seconds to the first token, e.g. 500ms@p90.", metavar="T@pQ")
    tpot: str | None = option(None, "limit on the seconds of each further token, e.g. 30ms@p90.", metavar="T@pQ")
    e2e: str | None = option(None, "limit on the seconds of a request, e.g. 20s@p99.", metavar="T@pQ")
    rate: float | None = option(None, "requests a second, in place of the load's.", ge=1e-6)
    concurrency: int | None = option(None, "requests that are kept in flight (closed loop), in place of a rate.", ge=1)
    weights: WeightDtype | None = option(None, "type of the weights. Default: bf16, or fp16 of devices without it.")
    kv: CacheDtype | None = option(None, "type of keys and values. Default: bf16.")
    modes: str = option(
        "agg,disagg", "agg (aggregated): instances prefill and decode; disagg (disaggregated): pools of their own for each; "
        "shared: both at once in an instance, each on a share of the multiprocessors; afd: as disagg, and attention and "
        "feed-forward parts of what decodes on devices of their own.",
        metavar="M,...",
    )  # fmt: skip
    scheduler: SchedulerPolicy | None = option(
        None,
        "mixed: a step has decoding rows and prompts; prefill_first: prompts have steps of their own. Default: the engine's.",
    )
    speculate: str | None = option(
        None, "tokens are drafted and checked: mtp[:k], eagle3[:k] or draft[:k],model=NAME, with accept=A (chance of a token) or "
        "lengths=1.8/2.3/2.6 (tokens a step with drafts of 1, 2, 3); without k as many as are best.",
        metavar="METHOD[:K],...",
    )  # fmt: skip
    adapters: str | None = option(
        None, "low-rank adapters that requests name, one each: n=200,rank=16, with zipf=1 (popularity of the k-th k^-zipf) and "
        "on=all or attention (what they change).",
        metavar="n=N,rank=R,...",
    )  # fmt: skip
    finetune: str | None = option(
        None, "an adapter that is trained in the steps that serve, as far as the limits leave room: rank=16, with seq_len=2048 and "
        "on=all or attention; with --modes agg.",
        metavar="rank=R,...",
    )  # fmt: skip
    nano_batches: Literal["on", "off"] = option(
        "off",
        "on: steps may be two halves, of which one sends rows to experts while the other computes (vllm, sglang).",
    )
    experts_on_host: str = option(
        "off", "routed experts that may lie in the host's memory, the least visited of each layer: on (as many as are best) or "
        "their share, with by=balance (copied or computed there, as is best), copy or compute, and predicted=A (share of copies "
        "that are foreseen).",
        metavar="on|off|SHARE[,...]",
    )  # fmt: skip
    prefix_cache: Literal["on", "off"] = option(
        "on", "on: prefixes of the load are in the cache; off: every prompt is computed."
    )

    def task(self, engine: str, objective: str | None) -> Serving:
        """Return the task.

        Raises:
            ConfigError: an option means nothing, with what would.
        """
        from ..schema.adapters import parse_adapters, parse_fine_tuning
        from ..schema.host_experts import parse_experts_on_host
        from ..schema.requests_file import parse_limit, parse_requests
        from ..schema.speculation import parse_speculation

        engines, goals = ServingEngine.__args__, ServingObjective.__args__  # type: ignore[attr-defined]
        if engine not in engines:
            raise ConfigError(f"--engine {engine} does not serve", help=f"one of {', '.join(engines)}")
        if objective is not None and objective not in goals:
            raise ConfigError(f"--objective {objective} with --serve", help=f"one of {', '.join(goals)}")
        names = [name.strip() for name in self.modes.split(",")]
        if unknown := [name for name in names if name not in MODES]:
            raise ConfigError(
                f"--modes {self.modes}: {', '.join(map(shown, unknown))}: no mode of deployment",
                help="agg, disagg, shared, afd, or several: agg,disagg",
            )
        texts: tuple[tuple[str, str | None], ...] = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        limits: tuple[LatencyLimit, ...] = tuple(
            parse_limit(metric, text)
            for metric, text in texts
            if text is not None  # type: ignore[arg-type]
        )
        return Serving(
            requests=parse_requests(self.requests, rate=self.rate, concurrency=self.concurrency),
            limits=limits,
            engine=engine,  # type: ignore[arg-type]
            objective=objective,  # type: ignore[arg-type]
            modes=tuple(dict.fromkeys(MODES[name] for name in names)),
            weights=self.weights,
            cache=self.kv,
            nano_batches=self.nano_batches == "on",
            experts_on_host=parse_experts_on_host(self.experts_on_host),
            prefix_cache=self.prefix_cache == "on",
            scheduler=self.scheduler,
            speculate=None if self.speculate is None else parse_speculation(self.speculate),
            adapters=None if self.adapters is None else parse_adapters(self.adapters),
            fine_tuning=None if self.finetune is None else parse_fine_tuning(self.finetune),
        )
