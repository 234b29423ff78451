"""`meshwright studio`: the page of a plan, made again as its controls move, for the browser of this machine."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ..schema.errors import ConfigError
from .options import command

HOST = "127.0.0.1"
"""Nothing but this machine reaches it."""


@command()
def studio(
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A plan.json to begin with. Default: a small example.")
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Where it listens; 0: a free port.", min=0, max=65535)] = 8350,
) -> None:
    """Plan in a browser: model, cluster, batch and limits as controls, the plan made again as they move, two plans side by side,
    and what another bandwidth, memory or price would change.

    It listens on this machine's loopback only, and Ctrl-C ends it. Needs `pip install "meshwright[studio]"`.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the studio needs {error.name}", help='pip install "meshwright[studio]"') from None
    from ..schema import TrainingPlan
    from .page.controls import Controls
    from .page.server import studio_app

    start = Controls(model="llama-3.1-8b", cluster="64xH100-SXM-80GB", global_batch_size=512, seq_len=8192)
    if plan is not None:
        start = Controls.of_plan(TrainingPlan.load(plan))
    listening = _listen(port)
    port = listening.getsockname()[1]
    app, state = studio_app(start, port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="on", ws="none"
    )

    class Server(uvicorn.Server):
        """Stops searches as soon as it is asked to end, so that no open page keeps it waiting."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            state.stop()
            super().handle_exit(sig, frame)

    typer.echo(f"http://{HOST}:{port}/")
    typer.echo("Ctrl-C ends the studio", err=True)
    with listening, suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])
    typer.echo("the studio has ended", err=True)


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback.

    Raises:
        ConfigError: the port is in use, or not allowed.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        raise ConfigError(f"port {port} {why}", help="give another --port, or --port 0 for a free one") from None
    return listening
