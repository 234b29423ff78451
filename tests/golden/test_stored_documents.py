"""Plans and profiles that an earlier version wrote still load, and say the same when they are saved again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from meshwright.schema import ConfigError, Profile, TrainingPlan
from meshwright.schema.generation import GenerationPlan
from meshwright.schema.layout import SWITCHES

RENAMED = ("status: optimal -> complete",)
"""A search that bounded everything was called optimal whatever its gap; now only below 0.1 %."""

FOLDER = Path(__file__).parent / "documents"
PROFILES = ("profile.json", "profile-corrected.json")
GENERATION = ("generation.json",)


def kind_of(name: str) -> Any:
    """Return the class that reads a document."""
    return Profile if name in PROFILES else GenerationPlan if name in GENERATION else TrainingPlan


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield what a document said and its successor does not; new fields are allowed."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                yield f"{path}.{key}"
            elif key != "schema_version":
                yield from lost(value, after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for idx, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}[{idx}]")
    elif before != after:
        yield f"{path}: {before} -> {after}"


@pytest.mark.parametrize("name", [path.name for path in sorted(FOLDER.glob("*.json"))])
def test_quick_stored_document_is_saved_with_equal_content(name: str, tmp_path: Path) -> None:
    kind_of(name).load(FOLDER / name).save(tmp_path / name)
    before, after = (json.loads((folder / name).read_text()) for folder in (FOLDER, tmp_path))
    for switch in {*SWITCHES} & before.get("workload", {}).keys():  # they were the workload's until 2026-11-23
        before["layout"][switch] = before["workload"].pop(switch)
    assert not [line for line in lost(before, after) if not line.endswith(RENAMED)]


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_quick_order_of_passes_has_a_line_for_each_rank(lines: int, tmp_path: Path) -> None:
    document = json.loads((FOLDER / "synthesised.json").read_text())
    assert len(document["pipeline_order"]) == 2
    document["pipeline_order"] = (2 * document["pipeline_order"])[:lines]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"with {lines} lines of an order"):
        TrainingPlan.load(tmp_path / "plan.json")
