"""`meshwright serve`: our own engine behind an OpenAI-compatible endpoint, and what it measured beside the plan."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import resource
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ..schema.errors import ConfigError, RuntimeMismatchError
from .options import JsonOption, OptionModel, PlanArgument, command, option

if TYPE_CHECKING:
    from ..runtime.serving.endpoint import Endpoint
    from ..runtime.serving.front import EngineFront
    from ..runtime.serving.meter import Meter
    from ..schema import ServingPlan

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = frozenset({LOOPBACK, "localhost", "::1"})


class ServeOptions(OptionModel):
    """What is served, to whom, and how much of it at once."""

    weights: Path | None = option(
        None, "folder of Hugging Face safetensors. Default: made weights of the plan's model.", metavar="FOLDER"
    )
    tokenizer: Path | None = option(
        None, "folder with tokenizer.json and the chat template. Default: that of the weights; without any, requests have tokens.",
        metavar="FOLDER",
    )  # fmt: skip
    adapter: tuple[str, ...] = option(
        (), "a low-rank adapter as peft saves it, which requests take by its name as their model; repeat.",
        metavar="NAME=FOLDER",
    )  # fmt: skip
    name: str | None = option(None, "what clients call the model. Default: its name in the plan.")
    host: str = option(
        LOOPBACK, "address to listen on; others than the loopback's are reachable from outside.", metavar="ADDRESS"
    )
    port: int = option(8000, "where it listens; 0: a free port.", ge=0, le=65535)
    max_queue: int = option(256, "requests that wait; one more gets 429 and is to come again.", ge=0)
    max_open: int = option(1024, "requests that are not answered in full.", ge=1)
    drain_s: float = option(60.0, "on SIGTERM: how long accepted requests may take.", ge=0, metavar="S")


@command()
def serve(plan: PlanArgument, options: ServeOptions, json: JsonOption = False) -> None:
    """Serve a plan's model on this machine with our own engine, OpenAI-compatible: /v1/completions, /v1/chat/completions,
    /v1/models, /health, /metrics. At the end: time to first token, time per token and queue as measured, beside the plan's.

    SIGTERM and Ctrl-C take no further requests, answer those accepted, and end with exit code 0; a second signal ends at once.
    Nothing but this machine reaches it unless --host says so. Needs `pip install "meshwright[serve]"`.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}", help='pip install "meshwright[serve]"') from None
    from ..runtime.serving.endpoint import Bounds, Endpoint
    from ..runtime.serving.meter import METRICS, Meter
    from ..runtime.serving.text import Text
    from ..schema import ServingPlan

    loaded = ServingPlan.load(plan)
    folder = options.tokenizer or options.weights
    has_text = folder is not None and (options.tokenizer is not None or (folder / "tokenizer.json").is_file())
    text = Text.load(folder) if folder is not None and has_text else None
    estimates = {name: getattr(loaded.estimate.overall, name) for name in METRICS}
    planned = {
        name: {share: getattr(estimate, f"{share}_s") for share in ("mean", "p50", "p90", "p99")}
        for name, estimate in estimates.items()
        if estimate is not None
    }
    with listening_socket(options.host, options.port) as listening, open_engine(loaded, options) as engine:
        endpoint = Endpoint(
            engine, model=options.name or loaded.model.name, text=text, bounds=Bounds(open_requests=options.max_open),
            meter=Meter(planned), hosts=LOOPBACK_NAMES if _is_loopback(options.host) else frozenset(),
        )  # fmt: skip
        address, port = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        typer.echo(f"http://{shown}:{port}/v1", err=json)
        if options.weights is None:
            typer.echo("weights are made: --weights FOLDER loads a model's", err=True)
        typer.echo("SIGTERM or Ctrl-C answers what was accepted, then ends", err=True)
        run(endpoint, listening, drain_s=options.drain_s)
        _report(endpoint.meter, as_json=json)
    if endpoint.failure is not None:
        raise RuntimeMismatchError(
            f"the engine failed: {type(endpoint.failure).__name__}", details=(str(endpoint.failure)[:500],)
        )


def open_engine(plan: ServingPlan, options: ServeOptions) -> EngineFront:
    """Return an engine for all pools of a plan.

    Raises:
        RuntimeMismatchError: this machine cannot run the plan.
    """
    from ..runtime.serving.deployment import open_engine as open_deployment

    device = "cpu"
    if not plan.cluster.weakest_device.backend.is_host:
        import torch

        available, needed = torch.cuda.device_count(), plan.num_devices
        if available < needed:
            raise RuntimeMismatchError(
                f"the plan has {needed} x {plan.pools[0].device}, and torch finds {available} GPUs here",
                help="plan with --cluster local, or export the plan for an engine",
            )
        device = "cuda"
    return open_deployment(
        plan.model, plan.pools, weights=options.weights, device=device, max_queue=options.max_queue,
        prefix_cache=plan.serving.prefix_cache, adapters=_adapters(options.adapter, options.name or plan.model.name),
    )  # fmt: skip


def _adapters(texts: tuple[str, ...], model: str) -> dict[str, Path]:
    """Read NAME=FOLDER.

    Raises:
        ConfigError: one is nothing of that kind, or a name is used twice.
    """
    adapters: dict[str, Path] = {}
    for text in texts:
        name, sign, folder = text.partition("=")
        if not (name and sign and folder):
            raise ConfigError(f"--adapter {text}: not a name and a folder", help="e.g. --adapter french=french-lora/")
        if name in adapters or name == model:
            raise ConfigError(f"--adapter {text}: {name} is the name of another adapter or of the model")
        adapters[name] = Path(folder)
    return adapters


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        ConfigError: there is no such address here, or the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host} is no address of this machine: {error}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        raise ConfigError(f"{host}:{port} {why}", help="give another --port, or --port 0 for a free one") from None
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run(endpoint: Endpoint, listening: socket.socket, *, drain_s: float) -> None:
    """Serve until a signal, then answer what was accepted; a second signal ends the process."""
    import uvicorn

    from ..runtime.serving.connection import connections_within

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = min(endpoint.bounds.connections, max(descriptors // 2, 1))
    http = connections_within(head_s=endpoint.bounds.head_s, unread_s=endpoint.bounds.unread_s, limit=limit)
    config = uvicorn.Config(
        endpoint, http=http, log_level="critical", access_log=False, timeout_graceful_shutdown=5, timeout_keep_alive=30,
        lifespan="off", ws="none", server_header=False, h11_max_incomplete_event_size=2**16,
    )  # fmt: skip

    class Server(uvicorn.Server):
        """Drains on the first signal."""

        drains: asyncio.Task[None] | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Begin to drain, or end at once."""
            if self.drains is not None or loop is None:
                os._exit(128 + sig)
            self.drains = loop.create_task(drain())

    async def drain() -> None:
        if not await endpoint.drain(drain_s):
            typer.echo(f"{len(endpoint.open)} requests were not answered within {drain_s:g} s", err=True)
        server.should_exit = True

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        endpoint.start()
        watch = loop.create_task(watch_failure())
        await server.serve(sockets=[listening])
        watch.cancel()
        await endpoint.stop()

    async def watch_failure() -> None:
        while endpoint.failure is None:
            await asyncio.sleep(0.2)
        await asyncio.sleep(1)  # those that wait hear of it first
        server.should_exit = True

    loop: asyncio.AbstractEventLoop | None = None
    server = Server(config)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, server.handle_exit)
    asyncio.run(main())


def _report(meter: Meter, *, as_json: bool) -> None:
    """Say what was measured beside what was planned."""
    import json

    from ..runtime.serving.meter import METRICS
    from ..schema.units import format_seconds
    from .terminal import headed_table, show

    measured = {name: meter.percentiles(name) for name in METRICS}
    if as_json:
        answer: dict[str, Any] = {"requests": dict(meter.outcomes), "generated_tokens": meter.output_tokens}
        typer.echo(json.dumps(answer | {"measured_s": measured, "planned_s": dict(meter.planned)}))
        return
    counts = ", ".join(f"{count} {outcome}" for outcome, count in meter.outcomes.items()) or "none"
    table = headed_table(f"requests: {counts}", "", "mean", "p50", "p90", "p99")
    for name in METRICS:
        for title, figures in (("measured", measured[name]), ("planned", meter.planned.get(name))):
            cells = [format_seconds(figures[share]) if figures else "-" for share in ("mean", "p50", "p90", "p99")]
            table.add_row(f"{name} {title}", *cells)
    show(table)
