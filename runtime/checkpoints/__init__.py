"""Checkpoints that any other layout can read; here where those of a run lie, which needs no torch."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from ...schema import ConfigError

INFO_FILE = "checkpoint.json"
_STEP_FOLDER = re.compile(r"step-(\d{8})")


def list_checkpoints(root: str | Path) -> tuple[Path, ...]:
    """Return the complete checkpoints under ``root``, oldest first; none where the folder does not exist."""
    root = Path(root)
    if not root.is_dir():
        return ()
    complete = (path for path in root.iterdir() if _STEP_FOLDER.fullmatch(path.name) and (path / INFO_FILE).is_file())
    return tuple(sorted(complete, key=lambda path: path.name))


def check_writable(root: str | Path) -> None:
    """Make the folder of the checkpoints and write in it, before a run depends on it."""
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"checkpoints fit")
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {root}: {error.strerror}") from None
