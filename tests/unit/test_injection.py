"""Names from files are data wherever they go: pages, pictures, launch scripts, manifests; none is code there."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from meshwright.cli.main import app
from meshwright.engines import RL_TARGETS, export
from meshwright.engines.registry import SERVING_TARGETS, TARGETS
from meshwright.schema import Layout, MeshwrightError, RlPlan, ServingPlan, Workload
from meshwright.schema.engine_facts import PLANNED_ENGINES
from meshwright.schema.plan import Plan
from plans import make_plan, tiny_model
from rl_plans import rl_plan
from targets import LLAMA
from typer.testing import CliRunner

HTML = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"
SHELL = "a'; touch executed; echo \"$(touch executed)`touch executed`\n touch executed #"
YAML = "x: !!python/object/apply:os.system ['touch executed']\n- &a [*a]\n\"}{"
CONTROL = "a\x00b\x1b]0;executed\x07\x85\u2028executed: 1"
NAMES = (HTML, SHELL, YAML, CONTROL)
WORK = Workload(seq_len=64, global_batch_size=8, precision="bf16-mixed")


class Tags(html.parser.HTMLParser):
    """The elements of a page, and the attributes that run code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs if name.startswith("on"))))


def tags_of(page: str) -> list[tuple[str, tuple[str, ...]]]:
    parser = Tags()
    parser.feed(page)
    return parser.found


def page_of(plan: Plan, folder: Path, *, explain_limit_s: float) -> str:
    """What `meshwright report` writes of a plan."""
    plan.save(folder / "plan.json")
    words = [
        "report",
        str(folder / "plan.json"),
        "--report",
        str(folder / "page.html"),
        "--explain-limit-s",
        str(explain_limit_s),
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return (folder / "page.html").read_text()


def plan_named(name: str, layout: Layout | None = None):
    plan = make_plan(tiny_model(num_blocks=4), layout or Layout(dp_shard=2, zero_stage=3), workload=WORK)
    group = plan.cluster.groups[0]
    cluster = plan.cluster.replace(name=name, groups=(group.replace(device=group.device.replace(name=name)),))
    return plan.replace(model=plan.model.replace(name=name), cluster=cluster)


@pytest.mark.parametrize("name", NAMES, ids=["html", "shell", "yaml", "control"])
def test_a_page_has_the_same_elements_whatever_names_are(name: str, tmp_path: Path) -> None:
    pages = [page_of(plan_named(each), tmp_path, explain_limit_s=0) for each in ("plain", name)]
    kinds = [set(tags_of(page)) for page in pages]
    assert kinds[1] == kinds[0]
    assert "<script>alert(1)" not in pages[1]
    assert "49" not in re.findall(r"&#39;&amp;(\d+)", pages[1])  # a template in a name is not filled


@pytest.mark.parametrize("name", NAMES, ids=["html", "shell", "yaml", "control"])
@pytest.mark.parametrize("engine", TARGETS)
def test_what_is_exported_runs_no_name(name: str, engine: str, tmp_path: Path) -> None:
    """Scripts are run with every command replaced by echo; manifests are read by a loader that makes objects of nothing."""
    layouts = Layout(dp_shard=2, zero_stage=3), Layout(tp=2), Layout(dp_shard=2, zero_stage=1)
    works = (WORK, WORK.replace(engine=engine) if engine in PLANNED_ENGINES else WORK)
    for layout, work in itertools.product(layouts, works):
        try:
            files = export(plan_named(name, layout).replace(workload=work), engine).files
        except MeshwrightError:
            continue
        for path, text in files:
            if path.endswith((".yaml", ".yml")):
                list(yaml.safe_load_all(text))
            if path.endswith(".sh"):
                require_inert(text, tmp_path)


def require_inert(script: str, folder: Path) -> None:
    (folder / "script.sh").write_text(script)
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for program in (
        "vllm",
        "sglang",
        "trtllm-serve",
        "torchrun",
        "python",
        "python3",
        "deepspeed",
        "accelerate",
        "nemo",
        "srun",
        "numactl",
        "uv",
        "git",
        "pip",
    ):
        (stubs / program).write_text("#!/bin/sh\nexit 0\n")
        (stubs / program).chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RDZV_ENDPOINT": "host:1", "NODE_RANK": "0", "MASTER_ADDR": "host"}
    command = ["timeout", "10", "bash", "script.sh"]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert not (folder / "executed").exists()


def test_what_is_said_commands_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "broken\x1b]0;executed\x07.json").write_text("{")
    plan_named(CONTROL).save(tmp_path / "plan.json")
    commands = (
        ["explain", "plan.json", "--time-limit-s", "2"],
        ["export", "plan.json", "--to", "torchtitan", "--out", "made"],
        ["goodput", "plan.json", "--mtbf-hours-per-device", "5000", "--save-s", "20", "--restart-s", "60"],
        ["explain", "broken\x1b]0;executed\x07.json"],
    )
    for command, *words in commands:
        words = [str(tmp_path / word) if word.endswith(".json") or word == "made" else word for word in words]
        result = CliRunner().invoke(app, [command, *words])
        said = result.stdout + result.stderr
        assert "executed" in said
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def rl_plan_named(name: str) -> RlPlan:
    plan = rl_plan([(4, ("generator", "actor", "reference"))], {}, generation_engine="vllm")
    work = plan.post_training
    models = tuple(each.replace(model=each.model.replace(name=name)) for each in work.models)
    return plan.replace(post_training=work.replace(models=models, reward_function=name), model=models[0].model)


@pytest.mark.parametrize("name", NAMES, ids=["html", "shell", "yaml", "control"])
@pytest.mark.parametrize("engine", RL_TARGETS)
def test_what_trains_after_training_runs_no_name(name: str, engine: str, tmp_path: Path) -> None:
    files = export(rl_plan_named(name), engine).files
    assert files
    for _, text in files:
        require_inert(text, tmp_path)


@pytest.fixture(scope="module")
def serving_plan(tmp_path_factory: pytest.TempPathFactory) -> ServingPlan:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    words = ["--serve", "--cluster", "2xH100-SXM-80GB", "--requests", "isl=32,osl=16,rate=2", "--ttft", "1s@p90"]
    result = CliRunner().invoke(app, ["plan", str(folder / "config.json"), *words, "--out", str(folder / "plan.json")])
    assert result.exit_code == 0, result.output
    return ServingPlan.load(folder / "plan.json")


@pytest.mark.parametrize("name", NAMES, ids=["html", "shell", "yaml", "control"])
def test_what_serves_runs_no_name(name: str, serving_plan: ServingPlan, tmp_path: Path) -> None:
    named = serving_plan.replace(model=serving_plan.model.replace(name=name))
    exported = []
    for engine in SERVING_TARGETS:
        try:
            exported += export(named, engine).files
        except MeshwrightError:
            continue
    assert exported
    for path, text in exported:
        if path.endswith((".yaml", ".yml")):
            list(yaml.safe_load_all(text))
        if path.endswith(".sh"):
            require_inert(text, tmp_path)


def test_pages_of_other_tasks_have_the_same_elements_whatever_names_are(
    serving_plan: ServingPlan, tmp_path: Path
) -> None:
    def serving_named(name: str) -> ServingPlan:
        return serving_plan.replace(model=serving_plan.model.replace(name=name), notes=(name,))

    for named in (serving_named, rl_plan_named):
        # How much is explained in that time differs.
        pages = [set(tags_of(page_of(named(name), tmp_path, explain_limit_s=0.3))) for name in ("plain", HTML)]
        assert pages[0] == pages[1]
