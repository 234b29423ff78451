"""Send a load to an OpenAI-compatible endpoint and print what its clients saw.

    python benchmarks/serving_load.py http://127.0.0.1:8000/v1 --isl 64 --osl 32 --rate 0.5 --count 60
    python benchmarks/serving_load.py http://127.0.0.1:8000/v1 --isl 64 --osl 32 --concurrency 4 --count 60

Requests arrive as a Poisson process (``--rate``) or are kept in flight (``--concurrency``); prompts are random tokens, answers
streamed. Prints one JSON object: seconds to the first token, of each further one, of the whole request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.parse
from typing import Any

import numpy as np


async def one(host: str, port: int, path: str, body: dict[str, Any]) -> tuple[float, float, float]:
    """Send a request; return when it was sent, and when its first and last token came."""
    payload = json.dumps(body).encode()
    sent_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path}/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    status = (await reader.readline()).decode().split()[1]
    if status != "200":
        raise RuntimeError(f"status {status}: {(await reader.read())[-500:].decode()}")
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
            times.append(time.monotonic())
    writer.close()
    return sent_s, times[0], times[-1]


async def load(options: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Send all requests; return the times of each."""
    address = urllib.parse.urlparse(options.url)
    assert address.hostname is not None
    assert address.port is not None
    draw = np.random.default_rng(options.seed)
    prompts = draw.integers(1, options.vocabulary, (options.count, options.isl)).tolist()
    bodies = [{"model": options.model, "prompt": p, "max_tokens": options.osl, "stream": True} for p in prompts]
    calls = [one(address.hostname, address.port, address.path, body) for body in bodies]
    if options.rate is None:
        slots = asyncio.Semaphore(options.concurrency)

        async def in_slot(call: Any) -> tuple[float, float, float]:
            async with slots:
                return await call

        return await asyncio.gather(*map(in_slot, calls))
    tasks = []
    for call, gap in zip(calls, draw.exponential(1 / options.rate, options.count), strict=True):
        await asyncio.sleep(gap)
        tasks.append(asyncio.create_task(call))
    return await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--isl", type=int, required=True)
    parser.add_argument("--osl", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    times = np.array(asyncio.run(load(options)))
    seconds = {
        "ttft": times[:, 1] - times[:, 0],
        "tpot": (times[:, 2] - times[:, 1]) / max(options.osl - 1, 1),
        "e2e": times[:, 2] - times[:, 0],
    }
    answer = {
        name: {"mean": values.mean(), **{f"p{q}": np.quantile(values, q / 100) for q in (50, 90, 99)}}
        for name, values in seconds.items()
    }
    print(json.dumps({"requests": len(times), "duration_s": time.monotonic() - begun, "seconds": answer}))


if __name__ == "__main__":
    main()
