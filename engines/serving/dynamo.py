"""NVIDIA Dynamo: a DynamoGraphDeployment whose workers run the plan's engine behind Dynamo's router.

Source: ai-dynamo/dynamo, API nvidia.com/v1beta1 (deploy/operator/api/v1beta1/dynamographdeployment_types.go and
dynamocomponentdeployment_types.go), options of ai-dynamo 1.6.1 (dynamo/vllm/backend_args.py, sglang, trtllm, frontend).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from ...schema.serving import Pool
from ...schema.serving_plan import ServingPlan
from ..adapter import Adapter, Exported, Limit
from . import sglang, trtllm, vllm
from .deployment import (
    LOAD,
    PORT,
    arguments,
    common_notes,
    hub_name,
    instances,
    no_experts_on_host,
    title,
    to_set,
)
from .load import aiperf_lengths, load_script

VERSION = "1.6"
FILE = "deployment.yaml"
RUNTIMES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
_GPU = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
_ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def of_engine(plan: ServingPlan) -> str:
    """Return the engine that workers run: the plan's, of one without an engine vLLM."""
    return plan.serving.engine if plan.serving.engine in RUNTIMES else "vllm"


def gpu_resource(plan: ServingPlan, pool: Pool) -> str:
    """Return the name by which Kubernetes knows the devices of a pool; empty: none."""
    vendors = {group.device.vendor for group in plan.cluster.groups if group.device.name == pool.device}
    return next((_GPU[vendor] for vendor in vendors if vendor in _GPU), "")


GPUS = Limit(
    "known_device",
    lambda p: all(gpu_resource(p, pool) for pool in p.pools),
    lambda p: f"no resource of Kubernetes is known for {', '.join(sorted({pool.device for pool in p.pools}))}",
    "plan for NVIDIA or AMD GPUs",
)


def _of_engine(plan: ServingPlan) -> list[Limit]:
    return [limit for limit in _ENGINES[of_engine(plan)].ADAPTER.limits if not limit.holds(plan)]


NAMED = Limit(
    "model_name",
    lambda p: re.fullmatch(r"[\w.-]+(/[\w.-]+)*", hub_name(p), re.ASCII) is not None,
    lambda p: f"the model is called {hub_name(p)!r}: manifests are expanded, and take letters, digits and . _ - / only",
    "rename the model in the plan, or export for the engine alone",
)

ENGINE_CAN = Limit(
    "engine",
    lambda p: not _of_engine(p),
    lambda p: f"{of_engine(p)}: {'; '.join(limit.reason(p) for limit in _of_engine(p))}",
    "export to the engine alone says what to change",
)


def name_of(plan: ServingPlan) -> str:
    """Return a name of Kubernetes for the deployment."""
    return f"meshwright-{re.sub(r'[^a-z0-9]+', '-', plan.model.name.lower()).strip('-')}"[:40].rstrip("-")


def _arguments(plan: ServingPlan, pool: Pool) -> list[str]:
    model, mode = ["--model", hub_name(plan)], ["--disaggregation-mode", pool.role]
    match of_engine(plan):
        case "vllm":
            words = arguments(vllm.parallelism(pool) | vllm.options(plan, pool))
        case "sglang":
            model, mode = ["--model-path", hub_name(plan)], []  # the mode is an option of SGLang's own
            words = arguments(sglang.options(plan, pool))
        case _:
            words = ["--override-engine-args", json.dumps(trtllm.options(plan, pool))]
    return [*model, *words, *(mode if pool.role != "agg" else [])]


def _component(name: str, kind: str, replicas: int, container: dict[str, Any], **fields: Any) -> dict[str, Any]:
    pod = {"spec": {"containers": [{"name": "main", **container}]}}
    return {"name": name, "type": kind, "replicas": replicas, **fields, "podTemplate": pod}


def write(plan: ServingPlan) -> Exported:
    """Return the plan as a manifest, and the load."""
    engine, lying = of_engine(plan), instances(plan)
    image = f"nvcr.io/nvidia/ai-dynamo/{RUNTIMES[engine]}:{VERSION}.1"
    frontend = ["--http-port", str(PORT), "--router-mode", "kv" if plan.serving.prefix_cache else "round-robin"]
    parts = [
        _component(
            "Frontend",
            "frontend",
            1,
            {"image": image, "command": ["python3", "-m", "dynamo.frontend"], "args": frontend},
        )
    ]
    for number, pool in enumerate(plan.pools):
        first = next(item for item in lying if item.pool == number)
        limits = {gpu_resource(plan, pool): str(len(first.devices))}
        container = {
            "image": image,
            "command": ["python3", "-m", f"dynamo.{engine}"],
            "args": _arguments(plan, pool),
            "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
            "resources": {"limits": limits, "requests": limits},
        }
        several = {"multinode": {"nodeCount": len(first.nodes)}} if len(first.nodes) > 1 else {}
        name = pool.role if sum(other.role == pool.role for other in plan.pools) == 1 else f"{pool.role}-{number}"
        kind = "worker" if pool.role == "agg" else pool.role
        parts.append(_component(name, kind, pool.replicas, container, **several))
    manifest = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name_of(plan)},
        "spec": {"backendFramework": engine, "components": parts},
    }
    load = load_script(
        plan, "dynamo", VERSION, command="aiperf profile", options=aiperf_lengths, routed=True, url='"${URL:?of the frontend}"',
        closed_option="concurrency", count_option="request-count",
    )  # fmt: skip
    return Exported(
        engine="dynamo",
        version=VERSION,
        files=((FILE, title(plan, "dynamo", VERSION) + yaml.safe_dump(manifest, sort_keys=False)), (LOAD, load)),
        not_expressed=common_notes(plan, engine),
        to_set=(
            *(line for line in to_set(plan) if not line.startswith("HOSTS")),
            "hf-token-secret: a secret with HF_TOKEN",
        ),
        command=f"kubectl apply -f {FILE}, then URL=... bash {LOAD}",
    )


ADAPTER = Adapter(version=VERSION, limits=(NAMED, GPUS, no_experts_on_host("dynamo"), ENGINE_CAN), write=write)
