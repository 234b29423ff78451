"""Kubernetes: jobs of Kubeflow whose pods run `meshwright apply` on the plan, one pod a node.

Two manifests for the two generations of the operator, each with the plan as a ConfigMap that the pods mount: a PyTorchJob, whose
operator tells every pod its position in RANK, MASTER_ADDR and MASTER_PORT (of pods, not of processes), and a TrainJob, whose
operator has them as PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.

Source: kubeflow/training-operator v1.9 (pkg/controller.v1/pytorch/envvar.go, pkg/webhooks/pytorch/pytorchjob_webhook.go);
kubeflow/trainer v2.2 (pkg/apis/trainer/v1alpha1/trainjob_types.go, pkg/runtime/framework/plugins/torch/torch.go,
manifests/base/runtimes/torch_distributed.yaml: the job and the container of a node are called node).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..schema.errors import ConfigError
from ..schema.training_plan import TrainingPlan
from .adapter import Adapter, Exported, Limit, comment

VERSION = "v1.9 (PyTorchJob), v2.2 (TrainJob)"
PYTORCH_JOB, TRAIN_JOB = "pytorchjob.yaml", "trainjob.yaml"

MAX_PLAN_BYTES = 1_000_000
"""Of a plan in a ConfigMap: Kubernetes takes 1 MiB of data (MaxSecretSize in pkg/apis/core/types.go)."""

_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "cpu": "cpu"}
_KEY = "plan.json"
_FOLDER = "/etc/meshwright"
_MOUNTS = [{"name": "plan", "mountPath": _FOLDER, "readOnly": True}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
_MANAGER = "meshwright.io/export"
_PINS_MEMORY = {"capabilities": {"add": ["IPC_LOCK"]}}
"""What a container needs that registers memory with a network card."""


class _WithoutAliases(yaml.SafeDumper):  # type: ignore[misc]
    """YAML in which what occurs twice is written twice, for tools that edit it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


LIMITS = (
    Limit(
        "own_engine",
        lambda p: p.workload.engine_facts.is_own_runtime,
        lambda p: (
            f"the plan is for {p.workload.engine}: the pods run `meshwright apply`, which has an engine of its own"
        ),
        "plan again without --engine",
    ),
    Limit(
        "applied",
        lambda p: not p.why_not_applied(is_user_model=p.model.code is not None),
        lambda p: (
            f"the pods run `meshwright apply`: {'; '.join(p.why_not_applied(is_user_model=p.model.code is not None))}"
        ),
        "export the plan for an engine that runs it",
    ),
    Limit(
        "alike_nodes",
        lambda p: len(p.cluster.groups) == 1,
        lambda p: f"{p.cluster.name} has several kinds of nodes: the pods of a job ask for the same devices",
        "plan for one kind of nodes",
    ),
    Limit(
        "known_device",
        lambda p: p.cluster.groups[0].device.vendor in _RESOURCES,
        lambda p: f"no resource of Kubernetes is known for {p.cluster.groups[0].device.name}",
        "plan for NVIDIA or AMD GPUs, or for CPUs",
    ),
    Limit(
        "plan_size",
        lambda p: len(_text(p)) <= MAX_PLAN_BYTES,
        lambda p: f"the plan has {len(_text(p))} bytes, a ConfigMap takes {MAX_PLAN_BYTES}",
        "put plan.json on storage that the pods share, and start `meshwright apply` there",
    ),
)


def write(plan: TrainingPlan, *, rdma_resource: str = "") -> Exported:
    """Return the plan as two manifests; one of them is to be applied.

    Args:
        rdma_resource: what a pod asks for to have the node's network cards: ``rdma/hca``, or a name and a number
            (``rdma/rdma_shared_device_a=8``), as the device plugin or the network operator of the cluster calls it.

    Raises:
        ConfigError: the resource is no name of Kubernetes.
    """
    words = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    name = f"meshwright-{words}"[:40].rstrip("-")  # by RFC 1035, short enough for the names of pods to be made of it
    head = comment(f"{plan.model.name} on {plan.layout.world_size} devices, {plan.layout}")
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {_KEY: _text(plan)}}
    cards = _cards(rdma_resource)
    files = tuple(
        (file, head + yaml.dump_all([config_map, job], Dumper=_WithoutAliases, sort_keys=False))
        for file, job in ((PYTORCH_JOB, _pytorch_job(plan, name, cards)), (TRAIN_JOB, _train_job(plan, name, cards)))
    )
    asks = plan.cluster.num_nodes > 1 and not cards and plan.cluster.groups[0].device.vendor != "cpu"
    return Exported(
        engine="kubernetes",
        version=VERSION,
        files=files,
        to_set=(
            "image: one that has meshwright",
            "--steps and --data after `meshwright apply`",
            "a volume that all pods share and --checkpoint-dir on it; then --resume lets a pod that comes back go on",
            *(
                [
                    f"the secret of the job: kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)"
                ]
                if plan.cluster.num_nodes > 1
                else []
            ),
            *(["network cards of the nodes: --rdma-resource rdma/hca, or what the cluster calls them"] if asks else []),
        ),
        command=f"kubectl apply -f {PYTORCH_JOB} (Kubeflow Trainer v2: {TRAIN_JOB})",
    )


def _text(plan: TrainingPlan) -> str:
    """Return what `apply` needs of the plan."""
    return plan.replace(alternatives=(), pareto=()).model_dump_json()


def _cards(resource: str) -> dict[str, int]:
    if not resource:
        return {}
    name, _, count = resource.partition("=")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", name) or not (
        count == "" or (count.isdigit() and int(count) > 0)
    ):
        raise ConfigError(f"rdma resource {resource!r} is not DOMAIN/NAME or DOMAIN/NAME=COUNT", help="e.g. rdma/hca=1")
    return {name: int(count or 1)}


def _container(plan: TrainingPlan, name: str, *, rank: str, address: str, port: str) -> dict[str, Any]:
    """Return the fields that the container of a PyTorchJob and the trainer of a TrainJob share.

    Args:
        rank, address, port: variables in which the operator tells a pod its position and where the first one is.
    """
    nodes = plan.cluster.num_nodes
    meet = f' --nnodes {nodes} --node-rank "${rank}" --rdzv-endpoint "${address}:${port}" --rdzv-id {name}'
    secret = {"name": name, "key": "secret"}
    environment = [{"name": "MESHWRIGHT_SECRET", "valueFrom": {"secretKeyRef": secret}}] if nodes > 1 else []
    script = f"exec meshwright apply {_FOLDER}/{_KEY} --steps 100{meet if nodes > 1 else ''}"
    return {
        "image": "meshwright:latest",
        "command": ["sh", "-c"],
        "args": [script],
        **({"env": environment} if environment else {}),
    }


def _resources(plan: TrainingPlan, cards: dict[str, int]) -> dict[str, Any]:
    amount = {_RESOURCES[plan.cluster.groups[0].device.vendor]: plan.cluster.largest_node, **cards}
    return {"requests": amount, "limits": amount}


def _volumes(name: str) -> list[dict[str, Any]]:
    return [
        {"name": "plan", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def _pytorch_job(plan: TrainingPlan, name: str, cards: dict[str, int]) -> dict[str, Any]:
    container = {
        "name": "pytorch",
        **_container(plan, name, rank="RANK", address="MASTER_ADDR", port="MASTER_PORT"),
        "resources": _resources(plan, cards),
        **({"securityContext": _PINS_MEMORY} if cards else {}),
        "volumeMounts": _MOUNTS,
    }
    pod = {"terminationGracePeriodSeconds": 60, "containers": [container], "volumes": _volumes(name)}
    workers = plan.cluster.num_nodes - 1
    replicas = {"Master": 1, **({"Worker": workers} if workers else {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for kind, count in replicas.items()
            },
        },
    }


def _train_job(plan: TrainingPlan, name: str, cards: dict[str, int]) -> dict[str, Any]:
    container = {
        "name": "node",
        "volumeMounts": _MOUNTS,
        **({"securityContext": _PINS_MEMORY} if cards else {}),
    }
    pod = {"spec": {"volumes": _volumes(name), "containers": [container]}}
    patch = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": pod}}}]}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": plan.cluster.num_nodes,
                "numProcPerNode": plan.cluster.largest_node,
                "resourcesPerNode": _resources(plan, cards),
                **_container(plan, name, rank="PET_NODE_RANK", address="PET_MASTER_ADDR", port="PET_MASTER_PORT"),
            },
            "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": patch}}],
        },
    }


ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write, options=("rdma_resource",))
