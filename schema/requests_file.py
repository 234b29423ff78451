"""Read a load of requests and limits on latency as a user types them, and recorded requests from a file.

    isl=4096,osl=512,rate=20,cv=1.5,prefix=0.4,prefixes=9    a class (prefix=512: in tokens)
    isl=512,osl=64,share=0.7;isl=8k,osl=512,share=0.3        several classes
    trace.csv, trace.csv.gz                           columns arrival_s, prompt_tokens, output_tokens[, prefix_blocks]
    500ms@p90, 30ms                                   a limit and the share of requests that must be within it (p90)

Prefix blocks are ids of blocks of 512 tokens, in order; a block that an earlier request had is in the cache (an infinite one).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import is_file, shown
from .csv_file import limited_lines, table_rows
from .errors import ConfigError
from .limits import MAX_PREFIX_BLOCKS, MAX_REQUESTS
from .serving import LatencyLimit, LatencyMetric, RequestClass, Requests, TraceFile
from .units import FloatArray, IntArray, parse_count

PREFIX_BLOCK = 512
"""Tokens of a block of ``prefix_blocks`` (Mooncake's traces)."""

PROMPT_BINS, OUTPUT_BINS = (0.3, 0.6, 0.85, 0.97), (0.4, 0.8)
"""Quantiles at which lengths are cut into classes: long prompts, which decide tails, have classes of their own."""

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
_KEYS = ("isl", "osl", "share", "prefix", "prefixes", "rate", "cv", "concurrency")
_LOAD_KEYS = frozenset({"rate", "cv", "concurrency"})
_EXAMPLE = "e.g. isl=4096,osl=512,rate=20,cv=1.5,prefix=0.4, or a csv file with columns " + ", ".join(_COLUMNS)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Trace:
    """Recorded requests in the order of their arrival, as arrays; ``prefix_len`` is what an infinite cache would have."""

    arrival_s: FloatArray
    prompt_len: IntArray
    output_len: IntArray
    prefix_len: IntArray
    file: TraceFile

    @property
    def rate(self) -> float:
        """Return requests a second over the recording."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self.arrival_s) - 1) / span if span > 0 else 0.0


def parse_requests(text: str, *, rate: float | None = None, concurrency: int | None = None) -> Requests:
    """Read a load: classes as text, or a file of recorded requests, which are binned into classes.

    Args:
        rate, concurrency: stand in for what the text or the file says.

    Raises:
        ConfigError: neither form, a number that means nothing, or both a rate and a concurrency.
    """
    if rate is not None and concurrency is not None:
        raise ConfigError("rate (open loop) and concurrency (closed loop) exclude each other", help="leave one out")
    if not is_stated(text):
        return requests_of_trace(read_trace(text), rate=rate, concurrency=concurrency)
    load: dict[str, float] = {}
    fields: list[dict[str, float]] = []
    for part in text.split(";"):
        entry: dict[str, float] = {}
        for item in filter(None, (item.strip() for item in part.split(","))):
            key, equals, value = (side.strip() for side in item.partition("="))
            target = load if key in _LOAD_KEYS else entry
            if not equals or key not in _KEYS or key in target:
                why = "is given twice" if key in target else f"is unknown; there are {', '.join(_KEYS)}"
                raise ConfigError(f"--requests: {shown(item)} {why}", help=_EXAMPLE)
            target[key] = _number(key, value)
        fields.append(entry)
    if len({"share" in entry for entry in fields}) > 1:
        raise ConfigError("--requests: some classes have a share and others none", help="share=0.7 and share=0.3")
    total = sum(entry.get("share", 1.0) for entry in fields)
    classes = tuple(_class_of(entry, total) for entry in fields)
    of_text = {"rate": load.get("rate"), "concurrency": load.get("concurrency")}
    if rate is not None or concurrency is not None:
        of_text = {"rate": rate, "concurrency": concurrency}
    return Requests(classes=classes, arrival_cv=load.get("cv", 1.0), **_without_none(of_text))  # type: ignore[arg-type]


def is_stated(text: str) -> bool:
    """Return whether a load is stated as text, not the name of a file."""
    return "=" in text and not is_file(text)


def _without_none(fields: dict[str, float | None]) -> dict[str, float | int]:
    return {key: (int(value) if key == "concurrency" else value) for key, value in fields.items() if value is not None}


def _number(key: str, text: str) -> float:
    try:
        value = float(parse_count(text)) if key in ("isl", "osl", "prefixes", "concurrency") else float(text)
    except ValueError as error:
        raise ConfigError(f"--requests: {key}={shown(text)}: {error}", help=_EXAMPLE) from None
    if not (np.isfinite(value) and value >= 0):
        raise ConfigError(f"--requests: {key}={shown(text)} is no number from 0 up", help=_EXAMPLE)
    if not value and key not in ("prefix", "cv"):
        raise ConfigError(f"--requests: {key}={shown(text)}: it is more than 0", help=_EXAMPLE)
    return value


def _class_of(entry: dict[str, float], total_share: float) -> RequestClass:
    missing = [key for key in ("isl", "osl") if key not in entry]
    if missing:
        raise ConfigError(f"--requests: {' and '.join(missing)} missing", help=_EXAMPLE)
    prefix, prompt_len = entry.get("prefix", 0.0), int(entry["isl"])
    if prefix >= 1 and (prefix == 1 or prefix != int(prefix) or prefix >= prompt_len):
        raise ConfigError(
            f"--requests: prefix={prefix:g} is neither a share of a prompt below 1 nor fewer tokens than its {prompt_len}",
            help=_EXAMPLE,
        )
    if "prefixes" in entry and not prefix:
        raise ConfigError("--requests: prefixes without prefix: how much of a prompt is shared", help=_EXAMPLE)
    return RequestClass(
        share=entry.get("share", 1.0) / total_share,
        prompt_len=prompt_len,
        output_len=int(entry["osl"]),
        prefix_len=int(prefix * prompt_len if prefix < 1 else prefix),
        num_prefixes=int(entry.get("prefixes", 1)),
    )


def parse_limit(metric: LatencyMetric, text: str) -> LatencyLimit:
    """Read a limit: ``500ms@p90``, ``2s@p99``, ``30ms`` (p90).

    Raises:
        ConfigError: no number with a unit, or no percentile.
    """
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s)(?:@p([0-9.]+))?", text.strip().lower())
    try:
        seconds, quantile = (float(match[1]) * _SECONDS[match[2]], float(match[3] or 90) / 100) if match else (0, 0)
    except ValueError:
        seconds = quantile = 0.0
    if not (0 < seconds < 1e6 and 0 < quantile < 1):
        raise ConfigError(
            f"--{metric} {shown(text)}: a time with its unit and the percentile that must be within it",
            help=f"e.g. --{metric} {'500ms' if metric == 'ttft' else '30ms'}@p90",
        )
    return LatencyLimit(metric=metric, seconds=seconds, quantile=quantile)


def read_trace(path: str | Path) -> Trace:
    """Read recorded requests; a file that ends with .gz is decompressed, to a limit.

    Raises:
        ConfigError: it cannot be read, lacks a column, or a line has no usable number; it says which.
    """
    digest = hashlib.sha256()

    def digested() -> Iterator[bytes]:
        for line in limited_lines(path):
            digest.update(line)
            yield line

    arrivals, lengths, seen, prefixes = (
        list[float](),
        list[tuple[int, int]](),
        dict[str, tuple[int, int]](),
        list[int](),
    )
    for line, row in table_rows(path, _COLUMNS, form=_EXAMPLE, lines=digested()):
        if len(arrivals) >= MAX_REQUESTS:
            raise ConfigError(f"{path} has more than {MAX_REQUESTS:,} requests", help="cut it")
        try:
            arrival, prompt, output = (float(row[name]) for name in _COLUMNS)
        except (TypeError, ValueError):
            raise ConfigError(f"{path}, line {line}: not three numbers: {shown([row[n] for n in _COLUMNS])}") from None
        if not (0 <= arrival < 1e12 and 1 <= prompt < 1e9 and 1 <= output < 1e9):
            raise ConfigError(
                f"{path}, line {line}: arrival {arrival:g} s, prompt {prompt:g}, output {output:g}: lengths are from 1 up"
            )
        blocks = (row.get("prefix_blocks") or "").split()
        known = next((k for k, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update((block, (seen.get(block, (len(arrivals),))[0], len(arrivals))) for block in blocks)
        if len(seen) > MAX_PREFIX_BLOCKS:
            raise ConfigError(f"{path} has more than {MAX_PREFIX_BLOCKS:,} different blocks of prefixes", help="cut it")
        arrivals.append(arrival)
        lengths.append((int(prompt), int(output)))
        prefixes.append(min(known * PREFIX_BLOCK, int(prompt) - 1))
    if not arrivals:
        raise ConfigError(f"{path} has no requests")
    order = np.argsort(np.array(arrivals), kind="stable")
    sizes = np.array(lengths, dtype=np.int64)[order]
    return Trace(
        arrival_s=np.array(arrivals)[order],
        prompt_len=sizes[:, 0],
        output_len=sizes[:, 1],
        prefix_len=np.array(prefixes, dtype=np.int64)[order],
        file=TraceFile(
            path=str(path),
            sha256=digest.hexdigest(),
            num_requests=len(arrivals),
            longest=int(sizes.sum(axis=1).max()),
            prefix_tokens=PREFIX_BLOCK * _peak_blocks(seen.values()),
        ),
    )


def _peak_blocks(uses: Iterable[tuple[int, int]]) -> int:
    """Return how many blocks, of those that come again, are between their first and last use at most."""
    again = np.array([use for use in uses if use[0] < use[1]], dtype=np.int64).reshape(-1, 2)
    if not len(again):
        return 0
    change = np.bincount(again[:, 0], minlength=again.max() + 2) - np.bincount(
        again[:, 1] + 1, minlength=again.max() + 2
    )
    return int(change.cumsum().max())


def requests_of_trace(trace: Trace, *, rate: float | None = None, concurrency: int | None = None) -> Requests:
    """Return the load of recorded requests: classes by quantiles of the lengths, rate and variation of arrivals.

    Raises:
        ConfigError: all requests arrive at once and neither a rate nor a concurrency is given.
    """
    file, arrival_cv = trace.file, 1.0
    if concurrency is None:
        recorded = trace.rate
        if rate is None and not recorded:
            raise ConfigError(
                f"{file.path}: all requests arrive at once, which is no rate",
                help="say --rate R or --concurrency N",
            )
        gaps = np.diff(trace.arrival_s)
        if recorded and len(gaps) > 1:
            arrival_cv = float(gaps.std() / gaps.mean())
        if rate is not None and recorded:
            file = file.replace(rate_scale=rate / recorded)
        rate = recorded if rate is None else rate
    return Requests(classes=_binned(trace), rate=rate, concurrency=concurrency, arrival_cv=arrival_cv, trace=file)


def _binned(trace: Trace) -> tuple[RequestClass, ...]:
    total, classes = len(trace.prompt_len), list[RequestClass]()
    by_prompt = np.searchsorted(np.quantile(trace.prompt_len, PROMPT_BINS), trace.prompt_len)
    for prompt_bin in range(len(PROMPT_BINS) + 1):
        members = np.flatnonzero(by_prompt == prompt_bin)
        if not len(members):
            continue
        by_output = np.searchsorted(np.quantile(trace.output_len[members], OUTPUT_BINS), trace.output_len[members])
        for output_bin in range(len(OUTPUT_BINS) + 1):
            idxs = members[by_output == output_bin]
            if len(idxs):
                prompt, output, prefix = (
                    max(round(float(values[idxs].mean())), minimum)
                    for values, minimum in ((trace.prompt_len, 1), (trace.output_len, 1), (trace.prefix_len, 0))
                )
                classes.append(
                    RequestClass(
                        share=len(idxs) / total,
                        prompt_len=prompt,
                        output_len=output,
                        prefix_len=min(prefix, prompt - 1),
                    )
                )
    return tuple(classes)
