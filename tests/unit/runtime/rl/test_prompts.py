"""Prompts are read, or refused with their line."""

from pathlib import Path

import pytest
from meshwright.runtime.rl.prompts import read_prompts
from meshwright.schema import ConfigError
from meshwright.schema.rl_file import read_workflow

WORKFLOW = """
algorithm = "grpo"
[actor]
model = "smollm2-135m"
[reward]
function = "rewards.py:count"
[batch]
prompts = 2
responses = 2
prompt_len = 3
mean_len = 4
max_len = 8
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, "line 2: not JSON"),
        ('{"prompt": [' + "9" * 4000 + "]}", "line 2: token an integer of"),
        ('{"prompt": [1, true]}', "line 2: .* is no prompt"),
        ("", "has 1 prompts, a step takes 2"),
    ],
    ids=["nested", "digits", "boolean", "none"],
)
def test_what_is_no_prompt_is_refused_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(WORKFLOW)
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": [1, 2]}}\n{line}\n')
    with pytest.raises(ConfigError, match=said):
        read_prompts(tmp_path / "prompts.jsonl", read_workflow(tmp_path / "rl.toml"))
