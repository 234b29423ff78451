"""llm-d: values of the chart llm-d-modelservice, and the configuration of its scheduler.

Source: llm-d-incubation/llm-d-modelservice v0.4.12 at 3051935eb5 (charts/llm-d-modelservice/values.schema.json,
templates/_helpers.tpl: the chart itself adds --port, --served-model-name and the sizes of tensor and data parallelism);
llm-d-inference-scheduler (EndpointPickerConfig of llm-d.ai/v1alpha1).
"""

from __future__ import annotations

from typing import Any

import yaml

from ...schema.serving import Pool
from ...schema.serving_plan import ServingPlan
from ..adapter import Adapter, Exported, Limit
from . import vllm
from .deployment import LOAD, PORT, arguments, common_notes, hub_name, spans_nodes, title, to_set
from .dynamo import GPUS, NAMED, gpu_resource
from .load import aiperf_lengths, load_script

VERSION = "0.4.12"
VALUES, SCHEDULER = "values.yaml", "scheduler.yaml"
_NIXL_PORT = 5600

LIMITS = (
    *vllm.ADAPTER.limits,
    GPUS,
    NAMED,
    Limit(
        "one_pool_of_role",
        lambda p: len({pool.role for pool in p.pools}) == len(p.pools),
        lambda _: "several pools of one role: the chart has one section for prefill and one for decode",
        "plan with one kind of device",
    ),
    Limit(
        "model_in_node",
        lambda p: (
            not any(
                spans_nodes(p, pool) and pool.layout.tp * pool.layout.pp > 1 and _too_wide(p, pool) for pool in p.pools
            )
        ),
        lambda p: "tp x pp of an instance is larger than a node: the chart spreads data parallelism over nodes only",
        "plan with --fix tp=N within a node",
    ),
)


def _node_devices(plan: ServingPlan, pool: Pool) -> int:
    return max(group.devices_per_node for group in plan.cluster.groups if group.device.name == pool.device)


def _too_wide(plan: ServingPlan, pool: Pool) -> bool:
    return pool.layout.tp * pool.layout.pp > _node_devices(plan, pool)


def _section(plan: ServingPlan, pool: Pool) -> dict[str, Any]:
    """Return a role's section; pp and what the chart adds by itself are as its templates have them."""
    layout, flags = pool.layout, vllm.parallelism(pool)
    for made_by_chart in ("tensor-parallel-size", "data-parallel-size"):
        flags.pop(made_by_chart, None)
    if layout.pp == 1:
        flags.pop("pipeline-parallel-size")
    per_node = min(_node_devices(plan, pool) // (layout.tp * layout.pp), layout.attention_dp)
    environment = [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(_NIXL_PORT)},
    ]
    gpus = {gpu_resource(plan, pool): str(layout.tp * layout.pp * per_node)}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": "ghcr.io/llm-d/llm-d-cuda:latest",
        "modelCommand": "vllmServe",
        "args": arguments(flags | vllm.options(plan, pool)),
        "resources": {"limits": gpus, "requests": gpus},
        "mountModelVolume": True,
    }
    if pool.role != "agg":
        container |= {"env": environment, "ports": [{"containerPort": _NIXL_PORT, "protocol": "TCP"}]}
    parallelism = {"tensor": layout.tp, "data": layout.attention_dp, "dataLocal": per_node}
    return {
        "create": True,
        "replicas": pool.replicas,
        "parallelism": parallelism | {"workers": layout.attention_dp // per_node},
        "containers": [container],
    }


def _scheduler(plan: ServingPlan) -> dict[str, Any]:
    """Return the scheduler's plugins: the least loaded instance, one with the prefix where prefixes are cached."""
    scorers = {
        "queue-scorer": 1,
        "kv-cache-utilization-scorer": 1,
        **({"prefix-cache-scorer": 2} if plan.serving.prefix_cache else {}),
    }
    roles = ("decode",) if plan.mode == "agg" else ("prefill", "decode")
    filters = [f"{role}-filter" for role in roles] if plan.mode == "disagg" else []
    handler = "pd-profile-handler" if plan.mode == "disagg" else "single-profile-handler"
    plugins = [{"type": kind} for kind in (handler, *filters, *scorers, "max-score-picker")]
    profiles = []
    for role in roles:
        chosen = [{"pluginRef": f"{role}-filter"}] if filters else []
        weighted = [{"pluginRef": scorer, "weight": weight} for scorer, weight in scorers.items()]
        profiles.append({
            "name": role if filters else "default",
            "plugins": [*chosen, *weighted, {"pluginRef": "max-score-picker"}],
        })  # fmt: skip
    kind = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return {**kind, "plugins": plugins, "schedulingProfiles": profiles}


def write(plan: ServingPlan) -> Exported:
    """Return the plan as values of the chart, its scheduler's configuration, and the load."""
    model = hub_name(plan)
    of_role = {"agg": "decode", "prefill": "prefill", "decode": "decode"}
    sections = {of_role[pool.role]: _section(plan, pool) for pool in plan.pools}
    values = {
        "multinode": any(spans_nodes(plan, pool) for pool in plan.pools),
        "modelArtifacts": {
            "name": model,
            "uri": f"hf://{model}",
            "size": f"{plan.model.num_params * 2 // 10**9 + 10}Gi",
        },
        "routing": {
            "servicePort": PORT,
            "proxy": {"enabled": plan.mode == "disagg", "connector": "nixlv2", "secure": False},
        },
        **sections,
        **({} if "prefill" in sections else {"prefill": {"create": False}}),
    }
    head = title(plan, "llm-d-modelservice", VERSION)
    load = load_script(
        plan, "llm-d", VERSION, command="aiperf profile", options=aiperf_lengths, routed=True, url='"${URL:?of the gateway}"',
        closed_option="concurrency", count_option="request-count",
    )  # fmt: skip
    files = (
        (VALUES, head + yaml.safe_dump(values, sort_keys=False)),
        (SCHEDULER, head + yaml.safe_dump(_scheduler(plan), sort_keys=False)),
        (LOAD, load),
    )
    return Exported(
        engine="llm-d",
        version=VERSION,
        files=files,
        not_expressed=common_notes(plan, "vllm"),
        to_set=(
            *(line for line in to_set(plan) if not line.startswith("HOSTS")),
            "containers[].image: a release of llm-d",
            "modelArtifacts.authSecretName, where the model asks for a token",
        ),
        command=f"helm install SERVICE llm-d-modelservice/llm-d-modelservice -f {VALUES}, then URL=... bash {LOAD}",
    )


ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write)
