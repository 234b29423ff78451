"""`meshwright profile --serve`, and the plan that follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.schema import Profile
from meshwright.schema.serving import ServingLayout
from meshwright.schema.serving_plan import ServingPlan
from typer.testing import CliRunner

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_the_engine_needs_a_model(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["profile", "--serve", "--out", str(tmp_path / "p.json")])
    assert answer.exit_code == 2
    assert "--model" in answer.output


@pytest.mark.long
def test_every_layout_is_measured_and_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    model, out, plan = tmp_path / "config.json", tmp_path / "p.json", tmp_path / "serve.json"
    model.write_text(json.dumps(CONFIG))
    measured = ["profile", "--model", str(model), "--serve", "--ranks", "2", "--weights", "fp32", "--budget-s", "150"]
    answer = CliRunner().invoke(app, [*measured, "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    profile = Profile.load(out)
    assert not profile.is_altered
    cases = {(point.layout, point.devices_in_use) for point in profile.serving_steps}
    alone = ServingLayout()
    assert cases == {(alone, 1), (alone, 2), (ServingLayout(tp=2), 2), (ServingLayout(pp=2), 2)}
    assert {point.rows for point in profile.serving_host} == {1, 4, 16}
    load = ["--requests", "isl=32,osl=8,rate=1", "--fix", "tp=2", "--modes", "agg"]
    answer = CliRunner().invoke(
        app, ["plan", str(model), "--serve", "--cluster", "local", "--profile", str(out), *load, "--out", str(plan)]
    )
    assert answer.exit_code == 0, answer.output
    planned = ServingPlan.load(plan)
    assert planned.serving.engine == "meshwright"
    assert planned.pools[0].layout == ServingLayout(tp=2)
    assert any("steps of tp=2 are measured" in note for note in planned.notes)
