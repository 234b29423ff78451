"""The studio: the page of a plan, made again as its controls move. It serves one machine's loopback and nobody else.

A page of another origin may make a browser send requests here, and a name may be made to resolve to 127.0.0.1 after it was loaded
(DNS rebinding). So the Host header must name the loopback and this port, and a request that computes must come from the page's own
origin with a JSON body. Other users of the machine reach its loopback too: where the kernel says whose a connection is (Linux),
only those of this user are answered.

    GET  /                     the page
    POST /plans                controls -> lines of JSON: progress, then a plan or an error
    POST /plans/{id}/explain   -> lines of JSON: how far it is, then the page with the plan explained
    GET  /plans/{id}/plan.json, report.html
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ...planner.explain.report import explain_in_parts
from ...planner.request import Deadline
from ...schema import MeshwrightError, TrainingPlan
from ...schema.catalogue import device_names, model_names
from ...schema.engine_facts import PLANNED_ENGINES
from ...schema.errors import ConfigError
from .controls import TIME_LIMIT_S, Controls, figures, progress
from .document import fragment, page, template

MAX_BODY_BYTES = 10_000
MAX_PLANS = 32
"""Plans that stay reachable by their ids; of more the oldest goes."""

PROGRESS_EVERY_S = 0.1
EXPLAIN_LIMIT_S = 60.0

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Put = Callable[[dict[str, Any]], None]
"""Sends a line to the page."""


class LoopbackOnly:
    """Middleware that answers only requests to this machine's own names, and computes only for the page's own origin."""

    def __init__(self, app: Any, port: int) -> None:
        """Stand before an application that listens on a port."""
        self.app, self.port = app, port
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))) is not None:
            await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "") not in self.hosts:
            return PlainTextResponse(f"this is meshwright studio at {min(self.hosts)}\n", 421)
        user = None if request.client is None else user_of(request.client.port, self.port)
        if user is not None and user != os.getuid():
            return PlainTextResponse("this is the studio of another user\n", 403)
        if request.method in ("GET", "HEAD"):
            return None
        origin, kind = request.headers.get("origin", ""), request.headers.get("content-type", "")
        if origin.removeprefix("http://") not in self.hosts or not origin.startswith("http://"):
            return PlainTextResponse("only the studio's own page may ask for plans\n", 403)
        if kind.partition(";")[0].strip() != "application/json":
            return PlainTextResponse("the body must be JSON\n", 415)
        return None


def user_of(port: int, server_port: int) -> int | None:
    """Return whose connection from a port of the loopback to ours is; None where the kernel does not say."""
    try:
        lines = Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]
    except OSError:
        return None
    loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
    ends = f"{loopback}:{port:04X}", f"{loopback}:{server_port:04X}"
    users = (int(fields[7]) for fields in map(str.split, lines) if (fields[1], fields[2]) == ends)
    return next(users, -1)


class Studio:
    """The plans that were made, and the computations under way: one for each page that is open and each of its tasks."""

    def __init__(self, start: Controls) -> None:
        """Begin with a state of the controls."""
        self.start = start
        self.plans: OrderedDict[str, TrainingPlan] = OrderedDict()
        self.running: dict[str, Deadline] = {}

    def deadline(self, key: str, limit_s: float) -> Deadline:
        """Return the deadline of a computation, which ends an older one of the same page and task."""
        if (older := self.running.get(key)) is not None:
            older.stop()
        self.running[key] = Deadline(limit_s)
        return self.running[key]

    def stop(self) -> None:
        """End everything that is under way."""
        for deadline in self.running.values():
            deadline.stop()

    def add(self, plan: TrainingPlan) -> str:
        """Store a plan and return its id."""
        name = secrets.token_urlsafe(9)
        self.plans[name] = plan
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)
        return name

    async def home(self, _request: Request) -> Response:
        """Show the page."""
        start = {
            "start": self.start.model_dump(),
            "models": model_names(),
            "devices": device_names(),
            "engines": PLANNED_ENGINES,
        }
        return HTMLResponse(template("studio.html.j2").render(start), headers=HEADERS)

    async def make_plan(self, request: Request) -> Response:
        """Answer a state of the controls with lines of JSON."""
        body = await _body(request)
        if not isinstance(body, dict) or not isinstance(body.get("controls"), dict):
            return JSONResponse(_refused(ConfigError("the body needs controls")), 422, headers=HEADERS)
        given, deadline = body["controls"], self.deadline(f"plan {body.get('page', '')}", TIME_LIMIT_S)

        def work(put: Put) -> dict[str, Any]:
            last_s = 0.0

            def report(evaluated: int, incumbent_s: float | None, bound_s: float) -> None:
                nonlocal last_s
                if time.perf_counter() - last_s > PROGRESS_EVERY_S:
                    last_s = time.perf_counter()
                    put(progress(evaluated, incumbent_s, bound_s))

            controls = Controls(**given)
            plan = controls.plan(deadline, report)
            return {"kind": "plan", "html": fragment(plan), "figures": figures(plan, controls), "id": self.add(plan)}

        return _streamed(work, deadline)

    async def explain_plan(self, request: Request) -> Response:
        """Explain a plan, as the page's part that says so."""
        plan = self.plans.get(request.path_params["id"])
        body = await _body(request)
        if plan is None or not isinstance(body, dict):
            return _no_plan()
        deadline = self.deadline(f"explain {body.get('page', '')}", EXPLAIN_LIMIT_S)

        def work(put: Put) -> dict[str, Any]:
            for part in explain_in_parts(plan, deadline=deadline):
                put({"kind": "progress", "done": round(100 * part.done)})
            return {"kind": "plan", "html": fragment(plan, part.explanation)}

        return _streamed(work, deadline)

    async def download(self, request: Request) -> Response:
        """Hand out a plan as its document or as its page."""
        plan, name = self.plans.get(request.path_params["id"]), request.path_params["name"]
        if plan is None or name not in ("plan.json", "report.html"):
            return _no_plan()
        text = plan.model_dump_json(indent=2) + "\n" if name == "plan.json" else await asyncio.to_thread(page, plan)
        kind = "application/json" if name == "plan.json" else "text/html"
        named = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type=kind, headers=HEADERS | named)


def _streamed(work: Callable[[Put], dict[str, Any]], deadline: Deadline) -> Response:
    """Return the lines of what a thread puts and its answer as they come; a page that is gone stops the thread."""
    return StreamingResponse(_lines(work, deadline), media_type="application/x-ndjson", headers=HEADERS)


async def _lines(work: Callable[[Put], dict[str, Any]], deadline: Deadline) -> AsyncIterator[str]:
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    def put(line: dict[str, Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def run() -> None:
        try:
            put(work(put) | {"stopped": deadline.is_stopped})
        except MeshwrightError as error:
            put(_refused(error) | {"stopped": deadline.is_stopped})
        except Exception as error:  # a page must say that something broke
            put(_refused(ConfigError(f"the studio failed: {type(error).__name__}: {error}")))
            raise

    threading.Thread(target=run, daemon=True, name="studio").start()
    try:
        while True:
            line = await lines.get()
            yield json.dumps(line) + "\n"
            if line["kind"] != "progress":
                return
    finally:
        deadline.stop()


async def _body(request: Request) -> Any:
    """Return the JSON of a small body; None of what is none."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _refused(error: MeshwrightError) -> dict[str, Any]:
    return {"kind": "error", "message": error.message, "details": list(error.details), "help": error.help or ""}


def _no_plan() -> Response:
    return JSONResponse(_refused(ConfigError("the studio no longer has this plan")), 404, headers=HEADERS)


def studio_app(start: Controls, port: int) -> tuple[Any, Studio]:
    """Return the application for a port, and what it knows."""
    studio = Studio(start)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        studio.stop()

    routes = [
        Route("/", studio.home),
        Route("/plans", studio.make_plan, methods=["POST"]),
        Route("/plans/{id}/explain", studio.explain_plan, methods=["POST"]),
        Route("/plans/{id}/{name}", studio.download),
    ]
    return LoopbackOnly(Starlette(routes=routes, lifespan=lifespan), port), studio
