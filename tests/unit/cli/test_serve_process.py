"""`meshwright serve` as a process: it drains on SIGTERM, ends at once on a second signal, and reports beside the plan."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from meshwright.cli.main import app
from meshwright.schema.serving import EngineLimits
from plans import cpu_cluster, tiny_model
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from serving_plans import pool_of, serving_plan

pytestmark = pytest.mark.job

BODY = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(folder: Path, *args: str, tp: int = 1) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, and the port that it says."""
    cluster = cpu_cluster(tp)
    limits = EngineLimits(max_batch=8, max_batched_tokens=128, chunk=64, cache_blocks=256, block_size=16)
    pool = pool_of(replicas=1, tp=tp, device=cluster.groups[0].device.name, limits=limits, weights="fp32", cache="fp32")
    model = tiny_model(num_blocks=2).replace(max_seq_len=4096)
    serving_plan(pool, cluster=cluster, model=model).save(folder / "serve.json")
    command = [sys.executable, "-m", "meshwright.cli", "serve", "serve.json", "--port", "0", "--json", *args]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("http://127.0.0.1:"), line + process.stderr.read()
        yield process, int(line.split(":")[2].split("/")[0])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def post(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_sigterm_answers_what_was_accepted(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        connection, stream = post(port, {**BODY, "max_tokens": 700, "stream": True})
        assert stream.status == 200 and stream.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + 30
        while (late := post(port, {**BODY, "max_tokens": 2}))[1].status != 503:
            assert late[1].status == 200 and time.monotonic() < until_s, "it still takes requests"
            late[0].close()
        late[0].close()
        content = stream.read()
        assert content.rstrip().endswith(b"data: [DONE]")
        connection.close()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        report = json.loads(out)
        assert report["requests"]["served"] >= 1 and report["measured_s"]["ttft"]["p50"] > 0
        assert report["planned_s"]["tpot"]["p90"] == pytest.approx(0.2)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        connection, stream = post(port, {**BODY, "max_tokens": 3000, "stream": True})
        assert stream.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        connection.close()


@pytest.mark.long
def test_two_ranks_serve_a_plan(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, port):
        alone = json.loads(post(port, {**BODY, "max_tokens": 12})[1].read())["choices"][0]["token_ids"]
    with serving(tmp_path, tp=2) as (process, port):
        assert json.loads(post(port, {**BODY, "max_tokens": 12})[1].read())["choices"][0]["token_ids"] == alone
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize(
    "args", [("--host", "203.0.113.9"), ("--port", "70000"), ("--tokenizer", "nowhere"), ("--weights", "nowhere")]
)
def test_what_cannot_be_served_is_said(args: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cpu_cluster(1)
    pool = pool_of(replicas=1, device=cluster.groups[0].device.name, weights="fp32", cache="fp32")
    serving_plan(pool, cluster=cluster, model=tiny_model()).save(tmp_path / "serve.json")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", "serve.json", *args])
    assert done.exit_code == 2 and done.stderr.startswith("error: ")
