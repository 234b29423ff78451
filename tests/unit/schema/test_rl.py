"""Workflows of post-training: what is read, what is refused and in which words, lengths from a mean, documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema import ConfigError, Plan, RlPlan
from meshwright.schema.rl import CALLS, lengths_of_mean
from meshwright.schema.rl_file import read_workflow

GRPO = """
algorithm = "grpo"
[actor]
model = "llama-3.2-1b"
[reference]
model = "actor"
[reward]
function = "rewards.py:exact"
[batch]
prompts = 32
responses = 8
prompt_len = 100
mean_len = 200
max_len = 512
updates = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "workflow.toml"
    path.write_text(text)
    return path


def test_a_workflow_is_read(tmp_path: Path) -> None:
    work = read_workflow(write(tmp_path, GRPO))
    assert work.samples == 256 and work.roles == ("generator", "actor", "reference")
    assert work.calls == ("generate", "log_probs", "reference", "update_actor")
    assert work.model_of("reference") == work.model_of("generator") == work.model_of("actor")
    assert [phase.name for phase in work.phases] == ["prefill", "decode", "log_probs", "reference", "update_actor"]
    assert work.phases[-1].has_backward and work.lengths.mean == pytest.approx(200, rel=0.01)
    assert type(work)(**work.model_dump()) == work


def test_a_critic_and_a_teacher_have_calls_of_their_own(tmp_path: Path) -> None:
    text = GRPO.replace('"grpo"', '"ppo"') + '[critic]\nmodel = "actor"\n[teacher]\nmodel = "llama-3.1-8b"\n'
    work = read_workflow(write(tmp_path, text))
    assert set(work.calls) == set(CALLS) - {"reward"}


def test_lengths_of_a_file_are_cut_at_the_longest(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n500\n9000\n")
    work = read_workflow(write(tmp_path, GRPO.replace("mean_len = 200", 'lengths = "lengths.txt"')))
    assert work.lengths.lengths == (10, 500, 512)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[actor]", "[acter]", "unknown table [acter]"),
        ("prompts = 32", "prompts = 0", "prompts"),
        ("prompts = 32", "promts = 32", "no field 'promts'"),
        ("mean_len = 200", "", "one of mean_len and lengths"),
        ("mean_len = 200", "mean_len = 900", "none of more than 512"),
        ("mean_len = 200", 'lengths = "none.txt"', "cannot read"),
        ("max_len = 512", "max_len = 1.5", "max_len"),
        ('function = "rewards.py:exact"', "", "function or"),
        ('function = "rewards.py:exact"', "function = 3", "function = 3"),
        ('model = "llama-3.2-1b"', 'model = "lama-9"', "lama-9"),
        ('model = "actor"', 'model = "gpt2"', "vocabularies"),
        ('"grpo"', '"ppo"', "critic"),
        ('"grpo"', '"dpo"', "algorithm"),
        ("responses = 8", "responses = 1", "at least 2"),
        ("updates = 2", "updates = 3", "not dealt evenly"),
        ("updates = 2", "updates = 2\n[policy]\nstaleness = -1", "staleness"),
        ("updates = 2", "updates = 2\n[policy]\noversample = 0.5", "oversample"),
        ("updates = 2", "updates = 2\n[policy]\nislands = 2", "set both, or neither"),
        ("updates = 2", "updates = 2\n[policy]\nislands = 2\nshared = 0.75", "generate at most 0.5"),
        ("updates = 2", "updates = 2\n[policy]\nislands = 2\nshared = 0.3", "no number of prompts"),
        ("updates = 2", "updates = 2\n[policy]\nislands = 2\nshared = 0.5\nlog_probs = 'generator'", "take log_probs = actor"),
        ("updates = 2", "updates = 2\n[engines]\ntraining = 'megatrn'", "engine"),
        ("[batch]", "[batch", "not valid TOML"),
        ('[reference]\nmodel = "actor"', "[loss]\nreference_weight = 0.1", "reference_weight"),
    ],
)  # fmt: skip
def test_a_wrong_workflow_is_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GRPO
    with pytest.raises(ConfigError) as error:
        read_workflow(write(tmp_path, GRPO.replace(old, new, 1)))
    assert says in "\n".join((str(error.value), *error.value.details))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.floats(0.1, 1.5))
def test_lengths_have_the_mean_they_are_made_for(one: int, other: int, sigma: float) -> None:
    mean, longest = sorted((one, other))
    lengths = lengths_of_mean(mean, longest, sigma=sigma)
    assert lengths.lengths[-1] <= longest
    assert lengths.mean == pytest.approx(mean, rel=0.05, abs=0.6)


def test_a_file_that_is_no_post_training_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"schema_version": 1, "post_training": {}}')
    with pytest.raises(ConfigError, match="not a valid plan file"):
        Plan.load(path)
    path.write_text('{"schema_version": 1, "workload": {}}')
    with pytest.raises(ConfigError) as error:
        RlPlan.load(path)
    assert "training" in "\n".join((str(error.value), *error.value.details))
