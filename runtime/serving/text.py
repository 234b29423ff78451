"""Text to tokens and back, by the files of a model folder: tokenizer.json, and the chat template of tokenizer_config.json.

Nothing of a folder is executed: `tokenizers` reads data, and templates are rendered by chat_worker.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schema.base import read_json, read_text
from ...schema.errors import ConfigError
from ..tokenizer import open_tokenizer, refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RENDER_LIMIT_S = 3.0
MAX_TEMPLATE_CHARACTERS = 2**20
_LINE_BYTES = 2**25
"""Of a worker's answer at most; more than what it may render as JSON."""


class Text:
    """The tokenizer of a model, its template, and the tokens that end an answer.

    Attributes:
        stop_tokens: that the model ends an answer with.
        longest: token, in characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: str | None, named: dict[str, str], stop_tokens: frozenset[int]
    ) -> None:
        self._tokenizer, self._template, self._named, self.stop_tokens = tokenizer, template, named, stop_tokens
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._worker: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @classmethod
    def load(cls, folder: str | Path) -> Text:
        """Read a folder with tokenizer.json, and tokenizer_config.json, chat_template.jinja and generation_config.json if there.

        Raises:
            ConfigError: there is no tokenizer, or a file is damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        tokenizer = open_tokenizer(path)
        config = _table(path.parent / "tokenizer_config.json")
        named = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _content(config.get(name)))
        }
        ends = _table(path.parent / "generation_config.json").get("eos_token_id")
        listed = ends if isinstance(ends, list) else [ends, tokenizer.token_to_id(named.get("eos_token", ""))]
        stop = frozenset(token for token in listed if isinstance(token, int) and not isinstance(token, bool))
        return cls(tokenizer, template=_template(path.parent, config), named=named, stop_tokens=stop)

    def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text.

        Raises:
            ConfigError: it is no text that the tokenizer takes.
        """
        with refused("the text cannot be tokenised"):  # half a surrogate pair, and what else Rust refuses
            return tuple(self._tokenizer.encode(text, add_special_tokens=adds_special).ids)

    def decoder(self) -> TextStream:
        """Return what makes text of tokens one after the other."""
        return TextStream(self._tokenizer)

    async def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return messages as the model's template has them, with the beginning of an answer.

        Raises:
            ConfigError: there is no template, or it refuses, fails or takes too long.
        """
        if self._template is None:
            raise ConfigError("the model folder has no chat template", help="use /v1/completions")
        context = {"messages": list(messages), "add_generation_prompt": True, "tools": None, **self._named}
        line = json.dumps({"template": self._template, "context": context}).encode() + b"\n"
        async with self._turn:
            try:
                answer = json.loads(await asyncio.wait_for(self._ask(line), RENDER_LIMIT_S))
            except (TimeoutError, ValueError, OSError):
                await self.close()
                raise ConfigError(f"the chat template took more than {RENDER_LIMIT_S:g} s, or all its memory") from None
            except asyncio.CancelledError:
                await self.close()  # an answer that nobody waits for must not be the next one's
                raise
        if "text" not in answer:
            raise ConfigError(f"the chat template refuses these messages: {answer['error']}")
        text: str = answer["text"]
        return text

    async def _ask(self, line: bytes) -> bytes:
        if self._worker is None or self._worker.returncode is not None:
            worker = str(Path(__file__).with_name("chat_worker.py"))
            pipe = asyncio.subprocess.PIPE
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable, "-I", worker, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=_LINE_BYTES,
                start_new_session=True, env={},
            )  # fmt: skip
        stdin, stdout = self._worker.stdin, self._worker.stdout
        assert stdin is not None and stdout is not None
        stdin.write(line)
        await stdin.drain()
        return await stdout.readline()

    async def close(self) -> None:
        """End the process of templates."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.returncode is None:
            worker.kill()
            await worker.wait()


class TextStream:
    """Text of tokens as they come; half a character waits for its rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Return what a further token adds to the text."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # bytes that are no text: the stream cannot go on from them
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
            return "\ufffd"


def _table(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty where there is none."""
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object")
    return content


def _content(token: Any) -> str | None:
    """Return a special token's text, which stands there as it is or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    template = read_text(path) if path.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    if not isinstance(template, str):
        return None
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(f"the chat template has {len(template)} characters, more than {MAX_TEMPLATE_CHARACTERS}")
    return template
