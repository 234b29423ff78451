"""Prompts of a run: a JSON object in each line, with ``prompt`` as tokens; its other fields go to the reward function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...schema.base import read_text, shown
from ...schema.errors import ConfigError
from ...schema.rl import RlWorkload


def read_prompts(path: str | Path, workload: RlWorkload) -> list[dict[str, Any]]:
    """Read prompts.

    Raises:
        ConfigError: the file cannot be read, a line is no prompt, a token is outside the vocabulary, or there are too few prompts.
    """
    vocabulary = workload.model_of("actor").vocab_size
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        prompt_of(row, vocabulary, where)
        rows.append(row)
    if len(rows) < workload.prompts:
        raise ConfigError(
            f"{path} has {len(rows)} prompts, a step takes {workload.prompts}", help="give more, or set prompts lower"
        )
    return rows


def prompt_of(row: Any, vocabulary: int, where: str) -> list[int]:
    """Return the tokens of a line's prompt.

    Raises:
        ConfigError: it has none, or a token is outside the vocabulary.
    """
    tokens = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ConfigError(f"{where}: {shown(tokens)} is no prompt", help='{"prompt": [1, 2, 3]}: a list of tokens')
    outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise ConfigError(f"{where}: token {shown(outside)} is not in the vocabulary of {vocabulary}")
    return tokens
