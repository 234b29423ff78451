"""Every layout of our serving engine generates what transformers does for each prompt alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_group
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.executor import Executor
from meshwright.runtime.serving.instance import Instance, follow
from meshwright.runtime.serving.ranks import join
from meshwright.runtime.serving.requests import Request, Sampling
from meshwright.schema.model import ModelSpec
from meshwright.schema.serving import ServingLayout
from serving_models import answers, generated, make_pool, make_prompts, save_model

LENGTHS = (1, 5, 17, 33, 40, 8, 3, 21)
COUNT = 10


@dataclass(frozen=True)
class Served:
    """A layout to serve with; what each rank returns: the driver the tokens of all prompts, the others nothing."""

    family: str
    layout: ServingLayout
    limits: dict[str, Any] = field(default_factory=dict)
    prefix_cache: bool = True
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """Return what tells cases apart."""
        degrees = "-".join(f"{axis}{degree}" for axis, degree in self.layout.model_dump().items() if degree > 1)
        rest = "-".join(f"{key}{value}" for key, value in self.limits.items())
        return "-".join(filter(None, (self.family, degrees, rest, "hot" * bool(self.temperature))))

    def run(self, case: Served, folder: Path) -> tuple[list[list[int]] | None, int]:
        """Serve on this rank; return tokens and preemptions."""
        weights = folder.parent / self.family
        ranks = join(self.layout, [0], "cpu")[0]
        pool = make_pool(layout=self.layout, **self.limits)
        executor = Executor(ModelSpec.from_hf(weights), ranks, pool, device=torch.device("cpu"), weights=weights)
        if ranks.rank:
            follow(executor)
            return None, 0
        with ServingEngine(Instance(executor), pool, reuses_prefixes=self.prefix_cache) as engine:
            tokens = answers(engine, make_requests(self.temperature))
            assert engine.stats().used_blocks == 0
            return tokens, engine.stats().preemptions


def make_requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(prompt=prompt, max_tokens=COUNT, sampling=Sampling(temperature=temperature, seed=i))
        for i, prompt in enumerate(make_prompts(LENGTHS))
    ]


CASES = {
    "2": [
        Served("Llama", ServingLayout(tp=2)),
        Served("Llama", ServingLayout(attention_dp=2)),
        Served("Llama", ServingLayout(pp=2), temperature=1.0),
        Served("Llama", ServingLayout(pp=2), {"cache_blocks": 16}, prefix_cache=False),
        Served("Mixtral", ServingLayout(tp=2, ep=2)),
        Served("Mixtral", ServingLayout(pp=2)),
    ],
    "2, others": [
        Served("Llama", ServingLayout(pp=2)),
        Served("Llama", ServingLayout(tp=2), temperature=1.0),
        Served("Llama", ServingLayout(attention_dp=2), {"cache_blocks": 13}, prefix_cache=False),
        Served("Llama", ServingLayout(tp=2), {"max_batched_tokens": 64, "chunk": None}),
        Served("Qwen3", ServingLayout(tp=2)),
        Served("Qwen3", ServingLayout(pp=2)),
        Served("Mixtral", ServingLayout(tp=2)),
        Served("Mixtral", ServingLayout(attention_dp=2)),
        Served("Mixtral", ServingLayout(attention_dp=2, ep=2)),
        Served("DeepseekV3", ServingLayout(tp=2, ep=2)),
        Served("DeepseekV3", ServingLayout(tp=2)),
        Served("DeepseekV3", ServingLayout(attention_dp=2, ep=2)),
        Served("DeepseekV3", ServingLayout(pp=2)),
    ],
    "4": [
        Served("Llama", ServingLayout(tp=2, pp=2)),
        Served("Mixtral", ServingLayout(tp=2, pp=2, ep=2)),
        Served("DeepseekV3", ServingLayout(tp=2, attention_dp=2, ep=4)),
        Served("DeepseekV3", ServingLayout(tp=2, attention_dp=2, ep=2)),
        Served("Mixtral", ServingLayout(attention_dp=2, pp=2, ep=2)),
    ],
}


@pytest.mark.job
@pytest.mark.parametrize("group", ["2", *(pytest.param(name, marks=pytest.mark.long) for name in ("2, others", "4"))])
def test_tokens_of_every_layout_are_those_of_one_rank(group: str, tmp_path: Path) -> None:
    cases, prompts = CASES[group], make_prompts(LENGTHS)
    families = {case.family for case in cases}
    expected = {family: generated(save_model(family, tmp_path / family), prompts, COUNT) for family in families}
    drawn = answers(ServingEngine.build(tmp_path / "Llama", make_pool()), make_requests(1.0))
    folder = tmp_path / "job"
    folder.mkdir()
    outcomes = run_group(int(group[0]), cases, folder, timeout_s=100)  # type: ignore[arg-type]
    for case in cases:
        tokens, preemptions = outcomes[case.name][0]  # type: ignore[misc]
        assert tokens == (drawn if case.temperature else expected[case.family]), case.name
        assert not case.limits.get("cache_blocks") or preemptions, case.name
