"""Plan how a large model is spread over machines, say why, and run the plan.

    import meshwright as mw
    plan = mw.plan("llama-3.1-8b", "64xH100-SXM-80GB", global_batch_size=1024, seq_len=8192)

These names are the public interface (docs/python.md). Each is loaded at its first use: torch only by what runs or profiles a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines import export, exportable, read_configuration
    from .planner import cheapest, compare, estimate, explain, pareto, plan, plan_rl, rehearse
    from .profilers import profile_module
    from .runtime import (
        Decoder,
        JobEvent,
        ParallelModel,
        apply,
        build_optimizer,
        clip_gradients,
        parallelize,
        run_rl,
        save_weights,
    )
    from .schema import (
        ClusterSpec,
        ConfigError,
        Generation,
        GenerationPlan,
        InfeasibleError,
        Layout,
        MeshwrightError,
        ModelSpec,
        Offer,
        Plan,
        Profile,
        ProfileError,
        RlPlan,
        RlWorkload,
        RuntimeMismatchError,
        SolverLimitError,
        TrainingPlan,
        Workload,
    )
    from .schema.catalogue import device_names, model_names

__all__ = [
    "ClusterSpec",
    "ConfigError",
    "Decoder",
    "Generation",
    "GenerationPlan",
    "InfeasibleError",
    "JobEvent",
    "Layout",
    "MeshwrightError",
    "ModelSpec",
    "Offer",
    "ParallelModel",
    "Plan",
    "Profile",
    "ProfileError",
    "RlPlan",
    "RlWorkload",
    "RuntimeMismatchError",
    "SolverLimitError",
    "TrainingPlan",
    "Workload",
    "apply",
    "build_optimizer",
    "cheapest",
    "clip_gradients",
    "compare",
    "device_names",
    "estimate",
    "explain",
    "export",
    "exportable",
    "model_names",
    "parallelize",
    "pareto",
    "plan",
    "plan_rl",
    "profile_module",
    "read_configuration",
    "rehearse",
    "run_rl",
    "save_weights",
]

_HOMES = {
    "planner": ("cheapest", "compare", "estimate", "explain", "pareto", "plan", "plan_rl", "rehearse"),
    "engines": ("export", "exportable", "read_configuration"),
    "profilers": ("profile_module",),
    "runtime": (
        "Decoder",
        "JobEvent",
        "ParallelModel",
        "apply",
        "build_optimizer",
        "clip_gradients",
        "parallelize",
        "run_rl",
        "save_weights",
    ),
    "schema": (
        "ClusterSpec",
        "ConfigError",
        "Generation",
        "GenerationPlan",
        "InfeasibleError",
        "Layout",
        "MeshwrightError",
        "ModelSpec",
        "Offer",
        "Plan",
        "Profile",
        "ProfileError",
        "RlPlan",
        "RlWorkload",
        "RuntimeMismatchError",
        "SolverLimitError",
        "TrainingPlan",
        "Workload",
    ),
    "schema.catalogue": ("device_names", "model_names"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("meshwright")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
