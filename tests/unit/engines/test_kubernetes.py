"""Manifests of jobs on Kubernetes: what their definitions require, and that what the pods run is the plan."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from meshwright.engines import export
from meshwright.engines.kubernetes import MAX_PLAN_BYTES
from meshwright.runtime.job.rendezvous import Rendezvous
from meshwright.schema import ConfigError, Layout, TrainingPlan, Workload
from plans import cpu_cluster, make_plan, tiny_model

REQUIRED: dict[str, tuple[str, ...]] = {
    # Kubernetes v1, ConfigMap.
    "ConfigMap": ("apiVersion", "metadata.name", "data"),
    # kubeflow.org_pytorchjobs.yaml of training-operator v1.9 and the checks of its webhook (a container called pytorch with an
    # image; one Master at most).
    "PyTorchJob": (
        "apiVersion", "metadata.name", "spec.pytorchReplicaSpecs.Master.replicas",
        "spec.pytorchReplicaSpecs.Master.template.spec.containers",
    ),
    # trainjob_types.go of Kubeflow Trainer v2, API v1alpha1.
    "TrainJob": ("apiVersion", "metadata.name", "spec.runtimeRef.name"),
}  # fmt: skip
TRAINER = {
    "image": str,
    "command": list,
    "args": list,
    "env": list,
    "numNodes": int,
    "resourcesPerNode": dict,
    "numProcPerNode": int,
}
"""Fields of spec.trainer in that API, and what they hold."""


def plan_of(num_devices: int = 2, *, num_nodes: int = 2, device: str | None = "H100-SXM-80GB") -> TrainingPlan:
    """A data-parallel plan; ``device`` None: for CPUs."""
    layout = Layout(dp_replicate=num_devices)
    plan = make_plan(
        tiny_model(), layout, workload=Workload(seq_len=32, global_batch_size=num_devices, precision="fp32")
    )
    cluster = cpu_cluster(num_devices)
    group = cluster.groups[0].replace(num_nodes=num_nodes, devices_per_node=num_devices // num_nodes)
    if device is not None:
        group = group.replace(device=group.device.replace(name=device, vendor="nvidia"))
    return plan.replace(cluster=cluster.replace(groups=(group,)))


def field(document: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


def manifests(plan: TrainingPlan) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The two documents of each file, by the name of the file."""
    made = export(plan, "kubernetes")
    return {name: tuple(yaml.safe_load_all(text)) for name, text in made.files}  # type: ignore[misc]


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_manifests_have_what_their_definitions_require(num_nodes: int) -> None:
    plan = plan_of(2 * num_nodes, num_nodes=num_nodes)
    for config, job in manifests(plan).values():
        for document in (config, job):
            assert all(field(document, path) for path in REQUIRED[document["kind"]])
            assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])  # RFC 1035
        assert json.loads(config["data"]["plan.json"])["layout"] == json.loads(plan.layout.model_dump_json())
    _, pytorch = manifests(plan)["pytorchjob.yaml"]
    assert pytorch["apiVersion"] == "kubeflow.org/v1"
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    assert sum(spec["replicas"] for spec in replicas.values()) == num_nodes
    assert replicas["Master"]["replicas"] == 1
    for spec in replicas.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert (container["name"], container["resources"]["limits"]) == ("pytorch", {"nvidia.com/gpu": 2})
    _, train = manifests(plan)["trainjob.yaml"]
    assert train["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = train["spec"]["trainer"]
    assert {name: type(value) for name, value in trainer.items()} == TRAINER
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (num_nodes, 2)


PLACES = {
    "pytorchjob.yaml": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
    "trainjob.yaml": {
        "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
    },
}  # fmt: skip
"""What the operators set in the second pod of a job."""


@pytest.mark.parametrize("file", PLACES)
def test_pods_apply_the_plan_from_their_place(file: str, tmp_path: Path) -> None:
    """The pod's command in a shell, with a program called meshwright that keeps its arguments."""
    plan = plan_of(device=None)
    config, job = manifests(plan)[file]
    program = tmp_path / "meshwright"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "arguments"))}\n')
    program.chmod(0o755)
    holder = (
        job["spec"].get("trainer") or job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    )
    (variable,) = holder["env"]
    assert variable["valueFrom"]["configMapKeyRef"] == {"name": config["metadata"]["name"], "key": "plan.json"}
    (script,) = holder["args"]
    script = script.replace("/tmp/plan.json", str(tmp_path / "plan.json"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", variable["name"]: config["data"]["plan.json"], **PLACES[file]}
    subprocess.run([*holder["command"], script], env=environment, check=True)
    assert TrainingPlan.load(tmp_path / "plan.json") == plan
    command, path, *options = (tmp_path / "arguments").read_text().splitlines()
    assert (command, path) == ("apply", str(tmp_path / "plan.json"))
    given = dict(zip(options[::2], options[1::2], strict=True))
    addresses = [value for name, value in PLACES[file].items() if name.endswith("MASTER_ADDR")]
    ports = [value for name, value in PLACES[file].items() if name.endswith("MASTER_PORT")]
    assert given["--rdzv-endpoint"] == f"{addresses[0]}:{ports[0]}"
    Rendezvous(
        nnodes=int(given["--nnodes"]), node_rank=int(given["--node-rank"]), endpoint=given["--rdzv-endpoint"],
        run_id=given["--rdzv-id"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (lambda p: p.replace(workload=p.workload.replace(engine="megatron", precision="bf16-mixed")), "own_engine"),
        (
            lambda p: p.replace(
                cluster=p.cluster.replace(groups=(p.cluster.groups[0].replace(num_nodes=1),) * 2)
            ),
            "alike_nodes",
        ),
        (
            lambda p: p.replace(provenance=p.provenance.replace(created="x" * MAX_PLAN_BYTES)),
            "plan_size",
        ),
    ],
    ids=["own_engine", "alike_nodes", "plan_size"],
)  # fmt: skip
def test_what_no_pod_can_run_is_refused(change: Any, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        export(change(plan_of()), "kubernetes")
    assert any(f"[{limit}]" in line for line in caught.value.details)


def test_large_plan_fits_a_pod() -> None:
    plan = plan_of(4096, num_nodes=512)
    assert len(manifests(plan)["trainjob.yaml"][0]["data"]["plan.json"]) < MAX_PLAN_BYTES
    assert plan.layout == Layout(dp_replicate=4096)
