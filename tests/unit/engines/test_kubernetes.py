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
    secret = {"env": list} if num_nodes > 1 else {}
    assert {name: type(value) for name, value in trainer.items()} == TRAINER | secret
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (num_nodes, 2)


def pod_of(job: dict[str, Any], kind: str = "Worker") -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a node and its container: of the job itself, or what it patches into the runtime of a TrainJob."""
    if job["kind"] == "TrainJob":
        (patch,) = job["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert patch["manager"] and node["name"] == "node"
        spec = node["template"]["spec"]["template"]["spec"]
    else:
        spec = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize(
    ("given", "card"), [("rdma/hca", ("rdma/hca", 1)), ("nvidia.com/mlnxnics=8", ("nvidia.com/mlnxnics", 8))]
)
def test_pods_ask_for_network_cards_where_told(given: str, card: tuple[str, int]) -> None:
    name, count = card
    plan = plan_of()
    plain = export(plan, "kubernetes")
    assert any("--rdma-resource" in line for line in plain.to_set) and "rdma" not in "".join(
        text for _, text in plain.files
    )
    made = export(plan, "kubernetes", rdma_resource=given)
    assert not any("--rdma-resource" in line for line in made.to_set)
    pytorch, train = (list(yaml.safe_load_all(text))[1] for _, text in made.files)
    resources = pod_of(pytorch)[1]["resources"], train["spec"]["trainer"]["resourcesPerNode"]
    for amounts in resources:
        assert (
            amounts["limits"][name] == amounts["requests"][name] == count and amounts["limits"]["nvidia.com/gpu"] == 1
        )
    for job in (pytorch, train):
        assert pod_of(job)[1]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


@pytest.mark.parametrize("given", ["hca", "rdma/hca=0", "rdma/hca=x", "rdma/hca: 1", "-/hca", "rdma/hca\n  - x"])
def test_names_that_are_no_resources_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="rdma resource"):
        export(plan_of(), "kubernetes", rdma_resource=given)
    with pytest.raises(ConfigError, match="takes no rdma_resource"):
        export(plan_of(), "torchtitan", rdma_resource=given)


def test_yaml_has_no_anchors() -> None:
    for _, text in export(plan_of(), "kubernetes", rdma_resource="rdma/hca").files:
        assert not [event for event in yaml.parse(text) if getattr(event, "anchor", None)]


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_nothing_listens_beyond_the_pods(num_nodes: int) -> None:
    """No port, service, host network or privilege; the pods of one node have no place to meet, several the operator's only."""
    for config, job in manifests(plan_of(2 * num_nodes, num_nodes=num_nodes)).values():
        assert {config["kind"], job["kind"]} <= {"ConfigMap", "PyTorchJob", "TrainJob"}
        for field in ("hostNetwork", "hostPort", "ports", "hostIPC", "privileged"):
            assert f'"{field}"' not in json.dumps(job)
        holder = job["spec"].get("trainer") or pod_of(job, "Master")[1]
        endpoints = re.findall(r"--rdzv-endpoint (\S+)", holder["args"][0])
        assert all(re.fullmatch(r'"\$(PET_)?MASTER_ADDR:\$(PET_)?MASTER_PORT"', place) for place in endpoints)
        assert len(endpoints) == (num_nodes > 1)


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
    spec, container = pod_of(job)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/etc/meshwright"]["configMap"] == {"name": config["metadata"]["name"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    for key, text in config["data"].items():
        (tmp_path / key).write_text(text)
    (script,) = holder["args"]
    script = script.replace("/etc/meshwright/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **PLACES[file]}
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
