"""Profiles of serving engines by version, and the memory of their instances."""

from __future__ import annotations

import pytest
from meshwright.cost_models.serving.engine import EngineProfile, profiles
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec
from meshwright.schema.serving import ServingLayout, WeightDtype


def test_every_engine_has_a_profile_and_versions_are_in_order() -> None:
    assert {profile.engine for profile in profiles()} == {"vllm", "sglang", "trtllm", "meshwright"}
    assert EngineProfile.named("vllm").version == "0.17"
    assert EngineProfile.named("vllm", "0.7.1").version == "0.6"
    assert EngineProfile.named("vllm", "0.12.3").version == "0.8"
    assert EngineProfile.named("trtllm", "1.2.0rc6.post2").version == "1.1"
    assert EngineProfile.named("trtllm", "0.1").version == "0.14"


def test_an_unknown_engine_and_an_unreadable_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="no profile of a serving engine"):
        EngineProfile.named("tgi")
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineProfile.named("vllm", "nightly")


def test_captured_sizes_cover_the_batch() -> None:
    for profile in profiles():
        sizes = profile.graphs.sizes(100)
        assert list(sizes) == sorted(set(sizes))
        assert not sizes or sizes[-1] >= 100


def costs(name: str, layout: dict[str, int], weights: WeightDtype, cluster: str) -> StepCosts:
    return StepCosts.build(
        ModelSpec.named(name), ClusterSpec.parse(cluster), ServingLayout(**layout), weights=weights, cache="bf16"
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_more_devices_and_smaller_weights_leave_more_cache(engine: str) -> None:
    profile = EngineProfile.named(engine)

    def tokens(layout: dict[str, int], weights: WeightDtype) -> int:
        return serving_memory(
            costs("qwen3-32b", layout, weights, "8xH100-SXM-80GB"), profile, request_len=4096
        ).cache_tokens

    assert tokens({"tp": 2}, "bf16") < tokens({"tp": 2}, "fp8") < tokens({"tp": 4}, "fp8")


def test_what_does_not_fit_says_why() -> None:
    memory = serving_memory(
        costs("llama-3.1-70b", {}, "bf16", "1xH100-SXM-80GB"), EngineProfile.named("vllm"), request_len=2048
    )
    assert not memory.fits
    assert memory.cache_tokens == 0
    assert "weights of 131" in (memory.reason or "")


def test_the_cache_is_as_large_as_vllm_reports() -> None:
    """vLLM 0.19, Llama-3.1-8B in bf16 on an RTX 4090: 41,408 tokens (published with LLMServingSim's runs)."""
    memory = serving_memory(
        costs("llama-3.1-8b", {}, "bf16", "1xRTX4090-24GB"), EngineProfile.named("vllm"), request_len=2048
    )
    assert memory.cache_tokens == pytest.approx(41_408, rel=0.05)
