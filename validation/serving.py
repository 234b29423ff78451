"""Load tests of serving engines against the simulation: read a table of points, serve every one, score.

A row says model, devices, engine, layout, lengths and how many requests are in flight (docs/accuracy.md lists the columns). What it
leaves unsaid follows the engine's defaults and what is usual: a cache of the weights' width, requests sent as one burst and each
followed by another. Rows whose client is described have lengths drawn between 0.8 and 1 of the stated ones (InferenceX); those of
another client have equal ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..cost_models.coefficients import Coefficients
from ..cost_models.serving.engine import EngineProfile, Kernels, profiles
from ..cost_models.serving.memory import ServingMemory, serving_memory
from ..cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from ..cost_models.serving.speculation import with_drafts
from ..cost_models.serving.step import StepCosts
from ..schema import ClusterSpec, ModelSpec
from ..schema.catalogue import find_device
from ..schema.csv_file import table_rows
from ..schema.errors import ConfigError
from ..schema.limits import MAX_COUNT
from ..schema.serving import CacheDtype, ServingLayout, WeightDtype
from ..schema.speculation import parse_speculation
from . import inferencex

REQUIRED = ("model", "gpu", "engine", "mode", "gemm_dtype", "isl", "osl")
ROUNDS = 10
"""Requests of a load test over those in flight (InferenceX's client: 10, after a warm-up that has ended)."""

ALMOST_EQUAL = 0.995
"""Answers of another client over the stated length, at least: were they equal to the token, requests would begin and end together
for ever, as no server's do."""

SPARE_TOKENS = 1500
"""Token budget of a TensorRT-LLM server whose settings are generated, over a longest prompt and a token of every request
(aiconfigurator, generator/rule_plugin/trtllm.rule): one or two prompts a step."""

_MAX_REQUESTS = 6000
_MIN_ROUNDS = 3
_WEIGHTS: dict[str, WeightDtype] = {
    "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp8-block": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "int4": "int4",
    "int4-weights": "int4", "int8": "int8",
}  # fmt: skip
_FOUR_BIT = ("nvfp4", "mxfp4", "int4")
_SAME_SHAPE = {"deepseek-r1": "deepseek-v3"}
"""Models that are another one's shape with other weights."""

_MXFP4_MODELS = ("gpt-oss",)
"""Published in mxfp4; tables may call every type of 4 bits nvfp4."""


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One measured point; None or "" where the table does not say. Names are the table's.

    Attributes:
        described: the client is the described one, beside a server of the engine's own (`_has_day`).
    """

    id: str
    model: str
    gpu: str
    engine: str
    version: str = ""
    container: str = ""
    mode: str = "agg"
    gemm_dtype: str = "bf16"
    moe_dtype: str = ""
    speculate: str = ""
    isl: int
    osl: int
    concurrency: float | None = None
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    attention_dp: int | None = None
    ep: int | None = None
    prefill_workers: int | None = None
    prefill_tp: int | None = None
    prefill_attention_dp: int | None = None
    prefill_ep: int | None = None
    prefill_batch_per_rank: int | None = None
    decode_workers: int | None = None
    decode_tp: int | None = None
    decode_attention_dp: int | None = None
    decode_ep: int | None = None
    decode_batch_per_rank: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tokens_per_s_per_gpu: float | None = None
    layout: str = "given"
    ambiguous: int | None = None
    out_of_order: int | None = None
    measured: str = ""
    dump: str = ""
    described: bool = False

    @property
    def is_scored(self) -> bool:
        """Return whether the row counts: measured, its layout known, alone in its setting and in order with its neighbours."""
        return bool(
            self.tpot_ms
            and self.ttft_ms
            and self.layout in ("given", "corrected")
            and not self.ambiguous
            and not self.out_of_order
        )

    @property
    def setting(self) -> tuple[object, ...]:
        """Return what rows of one decision have in common: all but layout, devices, concurrency."""
        return (self.model, self.gpu, self.engine, self.mode, self.gemm_dtype, self.isl, self.osl)


@dataclass(frozen=True)
class ServingPrediction:
    """What a row is predicted to show; ``refused`` says why where nothing is."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tokens_per_s_per_gpu: float | None = None
    fits: bool | None = None
    refused: str | None = None


def read_serving(path: Path) -> list[ServingRow]:
    """Read a table of points.

    Raises:
        ConfigError: a column is missing or a cell cannot be read.
    """
    kinds = {field.name: str(field.type) for field in fields(ServingRow)}
    rows = []
    for line, cells in table_rows(path, REQUIRED, form=f"a table of load tests has {', '.join(REQUIRED)} at least"):
        values: dict[str, Any] = {"id": cells.get("id") or str(line - 1)}
        for name, kind in kinds.items():
            text = (cells.get(name) or "").strip()
            if name in ("id", "described") or not text:
                continue
            values[name] = text if kind == "str" else _number(text, kind, f"{path}, line {line}, {name}")
        if absent := [each.name for each in fields(ServingRow) if each.default is MISSING and each.name not in values]:
            raise ConfigError(f"{path}, line {line}: {absent[0]} is empty")
        rows.append(ServingRow(**values))
    described = {_load(row) for row in rows if _has_day(row)}
    drafts = {_set_up(row): _drafts(row) for row in rows if _has_day(row) and row.mode == "agg"}
    return [
        replace(
            row,
            described=_load(row) in described,
            speculate=row.speculate or (_drafts(row) if _has_day(row) else drafts.get(_set_up(row), "")),
        )
        for row in rows
    ]


def _has_day(row: ServingRow) -> bool:
    """Return whether the table that a row is from has a day for a name, as those of the described client have."""
    return re.fullmatch(r"\d{4}-\d\d-\d\d", row.dump or row.measured) is not None


def _load(row: ServingRow) -> tuple[object, ...]:
    """Return what rows of one client have in common: tables of others list its measurements again, without their day."""
    return (row.model, row.gpu, row.engine, row.isl, row.osl)


def _set_up(row: ServingRow) -> tuple[object, ...]:
    """Return what rows of one server have in common."""
    return (*_load(row), row.version, row.gemm_dtype, row.tp, row.attention_dp, row.ep)


def _drafts(row: ServingRow) -> str:
    if row.mode != "agg":
        return ""
    return inferencex.speculation(row.measured, row.engine, row.model, row.gpu, row.attention_dp or 1)


def _number(text: str, kind: str, where: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {text!r} is not a number") from None
    if not 0 <= value <= MAX_COUNT or ("int" in kind and value != int(value)):
        raise ConfigError(f"{where}: {text!r} is not a number that can be computed with")
    return int(value) if "int" in kind else value


def predict_serving(rows: Iterable[ServingRow]) -> list[ServingPrediction]:
    """Serve the load of every row."""
    return [_predict(row) for row in rows]


def _predict(row: ServingRow) -> ServingPrediction:
    try:
        served, fits, devices = serve_row(row)
    except ConfigError as error:
        return ServingPrediction(refused=error.message)
    rate = served.output_tokens_per_s
    if row.concurrency:  # as the table has it: without the ebb at the end of a test
        rate = row.concurrency * row.osl / (served.ttft_s.mean() + (row.osl - 1) * served.tpot_s.mean())
    return ServingPrediction(
        ttft_ms=float(served.ttft_s.mean() * 1e3),
        tpot_ms=float(served.tpot_s.mean() * 1e3),
        output_tokens_per_s_per_gpu=float(rate / devices),
        fits=fits,
    )


def serve_row(
    row: ServingRow, profile: EngineProfile | None = None, coefficients: Coefficients | None = None
) -> tuple[SimulatedRequests, bool, int]:
    """Return the simulated load test of a row, whether its instances fit their devices, and how many devices there are.

    Args:
        profile, coefficients: in place of the row's engine's, and of the packaged ones.

    Raises:
        ConfigError: the model, device, engine or layout is not known.
    """
    profile = profile or profile_of(row)
    costs = partial(_row_steps, row, kernels=profile.kernels, coefficients=coefficients)
    if row.engine == "trtllm" and row.described:
        overhead = profile.overhead
        profile = profile.replace(overhead=overhead.replace(row_s=overhead.row_s / inferencex.STREAM_INTERVAL))
    if row.engine == "sglang" and row.described:
        many = (row.concurrency or 0) >= inferencex.POLLS_MANY
        polls = inferencex.POLL_STEPS if many else inferencex.POLL_STEPS_OF_FEW
        profile = profile.replace(scheduler=profile.scheduler.replace(poll_steps=polls))
    if row.mode == "agg":
        layout = ServingLayout(tp=row.tp or 1, pp=row.pp or 1, attention_dp=row.attention_dp or 1, ep=row.ep or 1)
        replicas = max((row.gpus or 0) // layout.num_devices, 1)
        concurrency = max(round(row.concurrency or 1), 1)
        pool, memory = _pool(row, costs(layout), profile, replicas, concurrency, None)
        served = simulate(pool, load_of(row, concurrency), concurrency=concurrency)
        return served, memory.fits, replicas * layout.num_devices
    if not row.prefill_workers or not row.decode_workers:
        raise ConfigError("a disaggregated row needs its prefill and decode workers")
    prefill = ServingLayout(tp=row.prefill_tp or 1, attention_dp=row.prefill_attention_dp or 1, ep=row.prefill_ep or 1)
    decode = ServingLayout(tp=row.decode_tp or 1, attention_dp=row.decode_attention_dp or 1, ep=row.decode_ep or 1)
    ranks = row.decode_workers * decode.attention_dp
    concurrency = max(round(row.concurrency or (row.decode_batch_per_rank or 1) * ranks), 1)
    first, memory = _pool(row, costs(prefill), profile, row.prefill_workers, concurrency, None)
    second, more = _pool(row, costs(decode), profile, row.decode_workers, concurrency, row.decode_batch_per_rank)
    # Every device of a rank receives its share of a token's cache.
    transfer_s = costs(decode).cache_bytes_per_token / _NETWORK_BYTES_PER_S
    served = simulate(
        [first, second], load_of(row, concurrency), concurrency=concurrency, transfer_s_per_token=transfer_s
    )
    devices = row.prefill_workers * prefill.num_devices + row.decode_workers * decode.num_devices
    return served, memory.fits and more.fits, devices


def load_of(row: ServingRow, concurrency: int) -> RequestTable:
    """Return the requests of a load test: lengths drawn where its client is described, the same for the same row."""
    rounds = min(ROUNDS, max(_MAX_REQUESTS // concurrency, _MIN_ROUNDS))
    count = rounds * concurrency
    draw = np.random.default_rng((row.isl, row.osl, concurrency))
    parts = (0.8, 0.8) if row.described else (1.0, ALMOST_EQUAL)
    prompt, output = (
        draw.integers(math.ceil(part * n), n + 1, count) for part, n in zip(parts, (row.isl, row.osl), strict=True)
    )
    return RequestTable.of(prompt, np.maximum(output, 1))


def _row_steps(
    row: ServingRow, layout: ServingLayout, *, kernels: Kernels, coefficients: Coefficients | None
) -> StepCosts:
    """Return the steps of an engine instance of a row, without drafts."""
    cluster = _cluster(row.gpu, layout.num_devices)
    return _step(_model(row.model), cluster, layout, *_dtypes(row), kernels, coefficients)


def _pool(
    row: ServingRow, step: StepCosts, profile: EngineProfile, replicas: int, concurrency: int, batch: int | None
) -> tuple[EnginePool, ServingMemory]:
    """Return the engine instances of a row, and the memory of one."""
    layout = step.instance.layout
    if row.speculate:
        step = _drafting(step, row.speculate)
    share = math.ceil(concurrency / (replicas * layout.attention_dp))
    max_batch = batch or None
    memory = serving_memory(step, profile, request_len=row.isl + row.osl, max_batch=max_batch)
    limits = profile.limits(
        device_bytes=memory.device_bytes,
        # What does not fit is served all the same, so that it can be compared.
        cache_tokens=memory.cache_tokens if memory.fits else (row.isl + row.osl) * max(share, 1),
        max_batch=max_batch,
        max_batched_tokens=None if row.described else _generated_budget(row, profile, concurrency),
        longest_prompt=row.isl,
    )
    limits = limits.replace(max_batch=min(limits.max_batch, max(share, 1) * layout.pp))
    pool = EnginePool.of(
        step,
        profile,
        limits,
        replicas=replicas,
        ranks=layout.attention_dp,
        lanes=layout.pp,
    )
    return pool, memory


def _generated_budget(row: ServingRow, profile: EngineProfile, concurrency: int) -> int | None:
    """Return the token budget of a server that is not started by hand; None: its default."""
    if row.engine == "trtllm":
        return row.isl + SPARE_TOKENS + concurrency
    return profile.scheduler.embedded_batched_tokens


def profile_of(row: ServingRow) -> EngineProfile:
    """Return the engine's profile: of its version, with what InferenceX's servers were told."""
    profile = _profile_of_version(row)
    if row.engine == "vllm" and row.described and _cluster(row.gpu, 1).weakest_device.architecture == "blackwell":
        profile = profile.replace(kernels=profile.kernels.replace(all_reduce=inferencex.FUSED_ALL_REDUCE))
    return profile


def _profile_of_version(row: ServingRow) -> EngineProfile:
    """Return the profile of the version that the row or its container names, else of its date."""
    for text in (row.version, row.container.rpartition(":")[2]):
        match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
        # A runtime image of Dynamo has Dynamo's version, and not the engine's.
        if match and "runtime:" not in row.container and "nightly" not in text:
            return EngineProfile.named(row.engine, match[0])
    known = [entry for entry in profiles() if entry.engine == row.engine]
    before = [entry for entry in known if row.measured and entry.released <= row.measured]
    return max(before, key=lambda entry: entry.released) if before else EngineProfile.named(row.engine)


@cache
def _model(name: str) -> ModelSpec:
    key = name.lower()
    return ModelSpec.named(_SAME_SHAPE.get(key, key))


def _dtypes(row: ServingRow) -> tuple[WeightDtype, WeightDtype, CacheDtype]:
    """Return the types of weights, of experts' weights, and of the cache.

    Mixtures are published with experts of 4 bits and the rest in 16 (gpt-oss, Kimi-K2.5, DeepSeek-R1-FP4).
    """
    named = [_WEIGHTS.get(text) for text in (row.gemm_dtype, row.moe_dtype or row.gemm_dtype)]
    if None in named:
        raise ConfigError(f"weights of type {row.gemm_dtype!r} are not known", help=f"one of {', '.join(_WEIGHTS)}")
    weights, experts = cast("list[WeightDtype]", named)
    if any(row.model.lower().startswith(name) for name in _MXFP4_MODELS) and experts in _FOUR_BIT:
        experts = "mxfp4"
    has_experts = any(block.experts is not None for block, _ in _model(row.model).block_runs)
    if has_experts and weights in _FOUR_BIT:
        weights = "bf16"
    narrow = experts if has_experts else weights
    return weights, experts, "bf16" if narrow in ("bf16", "fp16", "int4") else "fp8"


@cache
def _cluster(gpu: str, devices: int) -> ClusterSpec:
    return ClusterSpec.parse(f"{devices}x{find_device(gpu)[0]}")


@cache
def _step(
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: ServingLayout,
    weights: WeightDtype,
    experts: WeightDtype,
    kv: CacheDtype,
    kernels: Kernels,
    coefficients: Coefficients | None,
) -> StepCosts:
    return StepCosts.build(
        model, cluster, layout, weights=weights, experts=experts, cache=kv, kernels=kernels, coefficients=coefficients
    )


@cache
def _drafting(step: StepCosts, text: str) -> StepCosts:
    speculation = parse_speculation(text)
    return with_drafts(step, speculation, speculation.draft_tokens or 1)


_NETWORK_BYTES_PER_S = 50e9
"""A NIC of 400 Gb/s a device, which moves caches between instances."""
