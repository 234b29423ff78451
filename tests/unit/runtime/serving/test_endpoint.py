"""The endpoint on the loopback with a real server and a tiny model: answers, bounds, clients that are slow, gone or hostile."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from meshwright.cli.serve import LOOPBACK_NAMES
from meshwright.runtime.serving.bodies import ChatBody, CompletionBody, RefusedError, read_body
from meshwright.runtime.serving.connection import connections_within
from meshwright.runtime.serving.endpoint import Bounds, Endpoint
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.requests import Request
from meshwright.runtime.serving.text import Text
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout
from plans import tiny_model
from safetensors.torch import save_file
from tiers import drawn

VOCABULARY = 320
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def make_engine(*, max_batch: int = 8, max_queue: int = 64, adapters: dict[str, Path] | None = None) -> ServingEngine:
    limits = EngineLimits(max_batch=max_batch, max_batched_tokens=128, chunk=64, cache_blocks=256, block_size=16)
    pool = Pool(device="cpu", replicas=1, layout=ServingLayout(), weights="fp32", cache="fp32", limits=limits)
    model = tiny_model(num_blocks=2, vocab_size=VOCABULARY).replace(max_seq_len=2048)
    return ServingEngine.build(model, pool, max_queue=max_queue, adapters=adapters)


@contextmanager
def served(*, text: Text | None = None, bounds: Bounds | None = None, **engine: Any) -> Iterator[tuple[Endpoint, int]]:
    """An endpoint on a free port of the loopback; at the end every block is free again."""
    with make_engine(**engine) as made:
        endpoint = Endpoint(made, model="tiny", text=text, bounds=bounds, hosts=LOOPBACK_NAMES)
        # With its protocol: asyncio sends at once only where that is known to be TCP.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        limits = endpoint.bounds
        http = connections_within(head_s=limits.head_s, unread_s=limits.unread_s, limit=limits.connections)
        server = uvicorn.Server(
            uvicorn.Config(endpoint, http=http, log_level="critical", lifespan="off", timeout_graceful_shutdown=2)
        )

        async def main() -> None:
            endpoint.start()
            await server.serve(sockets=[listening])
            await endpoint.stop()

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        try:
            yield endpoint, listening.getsockname()[1]
            if endpoint.failure is None:
                wait_until(lambda: not endpoint.open and made.stats().used_blocks == 0 and not made.has_work)
        finally:
            server.should_exit = True
            thread.join(30)
            listening.close()


def wait_until(holds: Any, limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "it never came to that"
        time.sleep(0.01)


def ask(
    port: int, body: Any, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Post a body (bytes as they are) and return status, JSON and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), answer.headers
    connection.close()
    return found


def test_the_model_that_is_asked_for_may_be_an_adapter(tmp_path: Path) -> None:
    model = tiny_model(num_blocks=2, vocab_size=VOCABULARY)
    heads = model.block_runs[0][0].attention
    torch.manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    down, up = torch.randn(2, model.hidden_dim), torch.randn(heads.num_heads * heads.head_dim, 2)
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with served(adapters={"french": tmp_path}) as (_, port):
        answers = [ask(port, {**body, **more})[1] for more in ({}, {"model": "tiny"}, {"model": "french"})]
        plain, named, french = (answer["choices"][0]["token_ids"] for answer in answers)
        assert plain == named != french
        assert answers[2]["model"] == "french"
        assert ask(port, {**body, "model": "german"})[0] == 404
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read())["data"]
        connection.close()
        assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("french", "tiny")]


def head_of(length: int) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def events_of(port: int, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Bytes as tokens, by number 0 to 255, and one that ends answers."""
    return Text.load(write_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE))


def write_tokenizer(folder: Path, template: str) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


PROMPT = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}


def test_tokens_are_those_of_the_engine_whole_and_streamed() -> None:
    with make_engine() as alone:
        alone.submit(Request(prompt=(5, 6, 7), max_tokens=20))
        expected = [event.token for event in alone.drain()]
    with served() as (endpoint, port):
        status, answer, _ = ask(port, {**PROMPT, "max_tokens": 20})
        assert status == 200 and answer["choices"][0]["token_ids"] == expected
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
        chunks = events_of(port, {**PROMPT, "max_tokens": 20, "stream_options": {"include_usage": True}})
        assert [token for chunk in chunks[:-1] for token in chunk["choices"][0]["token_ids"]] == expected
        assert chunks[-1]["usage"]["completion_tokens"] == 20
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 19 + ["length"]
        wait_until(lambda: endpoint.meter.outcomes["served"] == 2)
        stop = {**PROMPT, "max_tokens": 20, "stop_token_ids": [expected[4]]}
        first = expected.index(expected[4])
        ended = ask(port, stop)[1]["choices"][0]
        assert ended["finish_reason"] == "stop" and len(ended["token_ids"]) == first + 1


def test_text_chats_and_stops(text: Text) -> None:
    with served(text=text) as (_, port):
        asked = {"prompt": "hello", "max_tokens": 24, "temperature": 0}
        status, answer, _ = ask(port, asked)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 5
        whole = answer["choices"][0]["text"]
        assert "".join(chunk["choices"][0]["text"] for chunk in events_of(port, asked)) == whole
        status, refused, _ = ask(port, {**asked, "prompt": "hello" * 2**17})
        assert status == 400 and "655360 characters" in refused["error"]["message"]
        stop = whole[3:5]
        cut = ask(port, {**asked, "stop": [stop]})[1]["choices"][0]
        assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"
        streamed = events_of(port, {**asked, "stop": [stop]})
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == cut["text"]
        chat = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 8,
            "temperature": 0,
        }
        status, answer, _ = ask(port, chat, "/v1/chat/completions")
        assert status == 200 and answer["usage"]["prompt_tokens"] == len("<user>hi<assistant>")
        said = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in events_of(port, chat, "/v1/chat/completions")
        )
        assert said == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ raise_exception('no system messages here') }}",
        "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
        "{% if %}",
        "{{ ('{0.__globals__[json].codecs.sys.path}'|attr('format'))(strftime_now) }}",
    ],
)
def test_templates_cannot_do_harm(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    harmful = Text.load(write_tokenizer(tmp_path, template))
    with served(text=harmful) as (_, port):
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        status, answer, _ = ask(port, chat, "/v1/chat/completions")
        assert status == 400 and "template" in answer["error"]["message"]
        assert ask(port, {**PROMPT, "max_tokens": 2})[0] == 200
    assert not (tmp_path / "pwned").exists()


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from(["stream", "prompt", [1, 2], [[1]], [], {}, [True], ["a", "b"], [-1], [10**9], "\ud800"]),
)  # fmt: skip
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "n", "stream_options",
     "logprobs", "stop_token_ids", "logit_bias", "tools", "whatever"]
)  # fmt: skip
BODIES = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=6
)


@drawn(BODIES, few=150, many=600, under=settings(deadline=None, suppress_health_check=list(HealthCheck)))
def test_bodies_are_read_or_refused(body: dict[str, Any]) -> None:
    for kind in (CompletionBody, ChatBody):
        try:
            read = read_body(kind, json.dumps(body).encode())
            read.request((1,), 1, frozenset())
        except RefusedError as error:
            assert 400 <= error.status < 500 and error.content["error"]["message"]


def malformed(count: int) -> Iterator[bytes]:
    """Bodies that no server can take, made from one that it can."""
    rng, good = random.Random(0), json.dumps({**PROMPT, "max_tokens": 4}).encode()
    wrong: list[Any] = [None, "x", -1, 2**80, 1.5, [], {}, [[]], True, "\ud800", [1.5], ["a", "b"], {"a": 1}]
    for number in range(count):
        match number % 4:
            case 0:
                yield good[: rng.randrange(len(good))]
            case 1:
                broken = bytearray(good)
                broken[rng.randrange(len(good))] = rng.randrange(128, 256)
                yield bytes(broken)
            case 2:
                yield json.dumps({**PROMPT, "max_tokens": rng.choice([0, -3, "4", 2**70, 4.5, [], 10**6])}).encode()
            case _:
                name = rng.choice(["prompt", "unknown", "stop_token_ids", "n", "stream_options", "logit_bias"])
                yield json.dumps(
                    {"max_tokens": 2, **PROMPT, name: rng.choice([w for w in wrong if w not in (None, [], {})])}
                ).encode()


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.long)])
def test_malformed_requests_get_errors_and_change_nothing(count: int) -> None:
    with served() as (endpoint, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for body in [
            *malformed(count),
            b"",
            b"[" * 100_000,
            b"1" * 100_000,
            b'{"prompt":' + b"[1," * 5000,
            b"\x00" * 10,
        ]:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = json.loads(answer.read())
            assert 400 <= answer.status < 500, (body[:200], content)
            assert set(content["error"]) == {"message", "type", "param", "code"} and "Traceback" not in str(content)
        connection.close()
        assert ask(port, {**PROMPT, "max_tokens": 4})[0] == 200
        assert endpoint.meter.outcomes == {"refused": count + 5, "served": 1}


def test_bytes_that_are_no_http_end_the_connection_only() -> None:
    with served() as (_, port):
        for junk in (
            b"\x16\x03\x01\x02\x00",
            b"GET\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"A" * 200_000,
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                try:
                    client.sendall(junk)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
                except OSError:
                    pass
        assert ask(port, {**PROMPT, "max_tokens": 4})[0] == 200


def test_requests_outside_the_bounds_are_refused_by_status() -> None:
    with served(bounds=Bounds(body_bytes=1000, body_s=0.3)) as (_, port):
        assert ask(port, {**PROMPT, "prompt": list(range(300))})[0] == 413
        assert ask(port, PROMPT, **{"Content-Type": "text/plain"})[0] == 415
        assert ask(port, PROMPT, Host="evil.example")[0] == 421
        assert ask(port, PROMPT, Host="127.0.0.1.evil_example:80")[0] == 421
        assert ask(port, PROMPT, Host="localhost:1")[0] == 200
        assert ask(port, PROMPT, "/v1/nothing")[0] == 404
        assert ask(port, {**PROMPT, "model": "another"})[0] == 404
        assert ask(port, {**PROMPT, "prompt": "text"})[1]["error"]["param"] == "prompt"
        assert ask(port, {**PROMPT, "prompt": [VOCABULARY]})[0] == 400
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            slow.sendall(head_of(99) + b"{")
            assert b" 408 " in slow.recv(100)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v1/completions")
        answer = connection.getresponse()
        assert answer.status == 405 and json.loads(answer.read())["error"]["message"]
        for path in ("/health", "/v1/models", "/metrics"):
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read().decode()
            assert answer.status == 200 and content
        assert 'outcome="refused"' in content
        connection.close()


def test_a_head_that_does_not_end_and_further_connections_are_closed() -> None:
    with served(bounds=Bounds(head_s=0.5, connections=2)) as (_, port):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as silent,
            socket.create_connection(("127.0.0.1", port), timeout=30) as slow,
        ):
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            with socket.create_connection(("127.0.0.1", port), timeout=30) as third:
                assert third.recv(100) == b""
            slow.sendall(b"X-More: 1\r\n")
            assert silent.recv(100) == b"" and slow.recv(100) == b""
        assert ask(port, PROMPT)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_vanish_take_their_requests_along(stream: bool) -> None:
    with served() as (endpoint, port):
        body = json.dumps({**PROMPT, "max_tokens": 1900, "stream": stream}).encode()
        clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(5)]
        for client in clients:
            client.sendall(head_of(len(body)) + body)
        wait_until(lambda: endpoint.engine.stats().running == 5)
        for client in clients:
            client.close()
        wait_until(lambda: not endpoint.engine.has_work)
        wait_until(lambda: endpoint.meter.outcomes["cancelled"] == 5)
        assert endpoint.engine.stats().tokens < 5 * 1900


def test_a_client_that_does_not_read_is_let_go_and_stops_nobody() -> None:
    with served(bounds=Bounds(unread_s=0.5)) as (endpoint, port):
        body = json.dumps({**PROMPT, "max_tokens": 1900, "stream": True}).encode()
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", port))
        lazy.sendall(head_of(len(body)) + body)
        wait_until(lambda: len(endpoint.open) == 1)
        assert all(ask(port, {**PROMPT, "max_tokens": 8})[0] == 200 for _ in range(5))
        wait_until(lambda: not endpoint.open, 60)
        rest = b""
        while part := lazy.recv(2**20):
            rest += part
        assert b"[DONE]" not in rest, "an answer that was cut is not to look whole"
        lazy.close()


def test_a_connection_whose_answers_are_not_read_is_closed() -> None:
    with served(bounds=Bounds(unread_s=0.3)) as (_, port), socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", port))
        lazy.settimeout(30)
        with pytest.raises(ConnectionError):
            while True:
                lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)


def test_a_body_that_breaks_off_after_its_refusal_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (_, port), socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head)
        assert client.recv(100).startswith(b"HTTP/1.1 415")
        with suppress(ConnectionError):
            client.sendall(b"zz\r\n")
            while client.recv(2**16):
                pass
    assert not caplog.records


def test_bodies_in_hand_are_bounded_together() -> None:
    with served(bounds=Bounds(all_body_bytes=3000)) as (endpoint, port):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            slow.sendall(head_of(2900) + b" " * 2800)
            wait_until(lambda: endpoint._body_bytes == 2800)
            status, _, headers = ask(port, {**PROMPT, "user": "x" * 400})
            assert status == 429 and headers["Retry-After"]
        wait_until(lambda: endpoint._body_bytes == 0)
        assert ask(port, {**PROMPT, "user": "x" * 400})[0] == 200


def test_overload_is_refused_and_what_was_accepted_is_answered() -> None:
    with served(max_batch=1, max_queue=2) as (endpoint, port):
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda _: ask(port, {**PROMPT, "max_tokens": 40}), range(24)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429}
        assert all(len(content["choices"][0]["token_ids"]) == 40 for status, content, _ in answers if status == 200)
        assert all(int(headers["Retry-After"]) > 0 for status, _, headers in answers if status == 429)
        assert endpoint.meter.outcomes == {"served": statuses.count(200), "refused": statuses.count(429)}


def test_open_answers_are_bounded() -> None:
    with served(bounds=Bounds(open_requests=1)) as (endpoint, port), ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, port, {**PROMPT, "max_tokens": 600})
        wait_until(lambda: len(endpoint.open) == 1)
        status, answer, headers = ask(port, PROMPT)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error") and headers["Retry-After"]
        assert long.result()[0] == 200


def test_an_engine_that_fails_is_said_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (endpoint, port):

        def fail(*_: Any) -> None:
            raise RuntimeError("a rank died")

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, port, {**PROMPT, "max_tokens": 1900})
            wait_until(lambda: endpoint.engine.stats().running == 1)
            monkeypatch.setattr(endpoint.engine, "_begin_steps", fail)
            status, answer, _ = waiting.result(timeout=30)
        assert (status, answer["error"]["code"]) == (500, "engine_failed")
        assert ask(port, PROMPT)[0] == 503
