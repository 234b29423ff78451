"""Post-training plans for verl and NeMo RL: every name is one of theirs, values are the plan's, what they cannot run is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.engines import RL_TARGETS, export, exportable
from meshwright.schema import ConfigError, Layout, RlPlan
from rl_plans import rl_plan
from typer.testing import CliRunner

FIELDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "rl_fields.json").read_text())
"""Names of verl's generated reference configurations at b178a3cd5 and of NeMo RL's grpo_math_1B.yaml at 7ea279abf."""

TOGETHER = [(4, ("generator", "actor", "reference"))]
APART = [(2, ("generator",)), (2, ("actor", "reference"))]


def plan(pools: list[tuple[int, tuple[str, ...]]], layout: Layout | None = None, **fields: object) -> RlPlan:
    given = {"generation_engine": "vllm", "precision": "fp32", **fields}
    return rl_plan(pools, {} if layout is None else {"actor": layout}, **given)  # type: ignore[arg-type]


def settings(made: RlPlan, target: str) -> tuple[str, dict[str, str]]:
    """The command of a script, and its overrides."""
    ((_, text),) = export(made, target).files
    words = shlex.split(text.split("exec ")[1].replace("\\\n", " "))
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    return " ".join(word for word in words if word not in overrides), dict(word.split("=", 1) for word in overrides)


@pytest.mark.parametrize("target", RL_TARGETS)
@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(tp=2, dp_shard=2)])
def test_every_name_is_one_of_the_engine(target: str, layout: Layout) -> None:
    command, given = settings(plan(TOGETHER, layout), target)
    known = FIELDS["nemo-rl"]
    if target == "verl":
        known = FIELDS["ppo_megatron_trainer" if "megatron" in command else "ppo_trainer"]
    assert not given.keys() - set(known)


def test_a_critic_has_names_of_its_own() -> None:
    made = plan([(4, ("generator", "actor", "critic"))])
    _, given = settings(made, "verl")
    assert not given.keys() - set(FIELDS["ppo_trainer"])
    assert given["algorithm.adv_estimator"] == "gae" and "critic.model.fsdp_config.param_offload" in given
    with pytest.raises(ConfigError, match="cannot run"):
        export(made, "nemo-rl")


def test_log_probabilities_of_the_generator_are_for_verl_and_parts_of_a_step_for_neither() -> None:
    noted = plan(TOGETHER, log_probs="generator")
    assert settings(noted, "verl")[1]["algorithm.rollout_correction.bypass_mode"] == "True"
    for target, made in (
        ("nemo-rl", noted),
        *((target, plan(TOGETHER, updates=2, fetches=2)) for target in RL_TARGETS),
        *((target, plan(TOGETHER, islands=2, shared=0.5)) for target in RL_TARGETS),
    ):
        with pytest.raises(ConfigError, match="cannot run"):
            export(made, target)


def test_layouts_and_batches_are_those_of_the_plan() -> None:
    made = plan(TOGETHER, Layout(tp=2, dp_shard=2), prompts=8, updates=2)
    _, verl = settings(made, "verl")
    _, nemo = settings(made, "nemo-rl")
    assert verl["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == "2"
    assert nemo["policy.dtensor_cfg.tensor_parallel_size"] == "2"
    assert verl["actor_rollout_ref.actor.ppo_mini_batch_size"] == "4" and verl["data.train_batch_size"] == "8"
    assert nemo["policy.train_global_batch_size"] == "16" and nemo["grpo.num_generations_per_prompt"] == "4"
    assert int(verl["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]) >= 10  # the longest sample
    assert nemo["policy.generation.colocated.enabled"] == "True"


def test_pools_of_their_own_are_one_step_off() -> None:
    made = plan(APART, staleness=1.0)
    command, verl = settings(made, "verl")
    assert (
        "one_step_off_policy" in command and verl["rollout.n_gpus_per_node"] == verl["trainer.n_gpus_per_node"] == "2"
    )
    _, nemo = settings(made, "nemo-rl")
    assert nemo["policy.generation.colocated.resources.gpus_per_node"] == "2"
    assert nemo["grpo.async_grpo.enabled"] == nemo["loss_fn.use_importance_sampling_correction"] == "True"


@pytest.mark.parametrize(
    ("pools", "fields", "says"),
    [
        ([(1, ("generator", "reference")), (3, ("actor",))], {}, "pools"),
        (APART, {}, "staleness"),
        (TOGETHER, {"staleness": 1.0}, "staleness"),
        (TOGETHER, {"prompts": 3, "updates": 2}, "mini-batch"),
        (TOGETHER, {"generation_engine": "meshwright"}, "generation by meshwright"),
    ],
)
def test_what_verl_does_not_run_is_refused_by_name(pools: list, fields: dict, says: str) -> None:
    assert says in str(exportable(plan(pools, **fields))["verl"])


def test_the_command_writes_the_script_and_refuses_other_targets(tmp_path: Path) -> None:
    plan(TOGETHER).save(tmp_path / "rl.json")
    answer = CliRunner().invoke(
        app, ["export", str(tmp_path / "rl.json"), "--to", "verl", "--out", str(tmp_path / "out")]
    )
    assert answer.exit_code == 0 and (tmp_path / "out" / "run.sh").is_file()
    answer = CliRunner().invoke(app, ["export", str(tmp_path / "rl.json"), "--to", "megatron"])
    assert answer.exit_code == 2 and "verl, nemo-rl" in answer.output
