"""Serving plans as other engines' files: scripts are run by bash with recording stand-ins of the engines' commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from meshwright.engines import SERVING_TARGETS, Exported, export, exportable
from meshwright.schema import ConfigError, RequestClass, Requests, ServingPlan
from meshwright.schema.host_experts import ExpertsOnHost
from meshwright.schema.serving import ServingLayout
from meshwright.schema.speculation import Speculation
from plans import cpu_cluster
from serving_options import (
    AIPERF,
    DYNAMO,
    SGLANG,
    SGLANG_BENCH,
    TRTLLM,
    TRTLLM_BENCH,
    VLLM,
    VLLM_BENCH,
    parse,
    require_fields,
)
from serving_plans import AGGREGATED, CASES, DISAGGREGATED, EXPERTS, LIMITS, TWO_NODES, pool_of, serving_plan

RECORDED = ("vllm", "python3", "trtllm-serve", "mpirun", "vllm-router", "aiperf")
HOSTS = "10.0.0.1 10.0.0.2"


def run_script(
    exported: Exported, name: str, folder: Path, *args: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a script of an export; every engine's command that it calls leaves its words and variables."""
    exported.write(folder)
    bin_folder, log = folder / "bin", folder / "log"
    bin_folder.mkdir(exist_ok=True)
    log.mkdir(exist_ok=True)
    for tool in RECORDED:
        stand_in = bin_folder / tool
        stand_in.write_text(
            "#!/usr/bin/python3\nimport json, os, sys\n"
            "call = [os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)]\n"
            f"json.dump(call, open({str(log)!r} + f'/{{os.getpid()}}', 'w'))\n"
        )
        stand_in.chmod(0o755)
    variables = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOSTS": HOSTS, "URL": "http://127.0.0.1:1", **environment}
    done = subprocess.run(["bash", name, *args], cwd=folder, env=variables, capture_output=True, text=True, timeout=60)
    calls = [json.loads(path.read_text()) for path in sorted(log.iterdir())]
    for path in log.iterdir():
        path.unlink()
    made = [{"tool": tool, "words": words, "env": env} for tool, words, env in calls]
    return done, sorted(made, key=lambda call: call["words"])


def calls_of(
    plan: ServingPlan, engine: str, name: str, folder: Path, *args: str, **environment: str
) -> list[dict[str, Any]]:
    done, calls = run_script(export(plan, engine), name, folder, *args, **environment)
    assert done.returncode == 0, done.stderr
    return calls


@pytest.mark.parametrize("case", CASES)
def test_vllm_gets_options_it_has(case: str, tmp_path: Path) -> None:
    plan = CASES[case]
    nodes = 2 if plan.num_devices > 8 else 1
    starts = [call for node in range(nodes) for call in calls_of(plan, "vllm", "serve.sh", tmp_path, str(node))]
    servers = [parse(VLLM, call["words"][2:]) for call in starts]
    assert all(call["words"][:1] == ["serve"] for call in starts)
    assert sum("headless" not in server for server in servers) == sum(pool.replicas for pool in plan.pools)
    assert all(server["max-num-seqs"] == LIMITS.max_batch for server in servers)
    for call in calls_of(plan, "vllm", "load.sh", tmp_path):
        load = parse(VLLM_BENCH, call["words"][2:])
        assert load["random-prefix-len"] == 200 and load["random-input-len"] == 800
        assert load["request-rate"] == 2 and load["burstiness"] == 0.25


@pytest.mark.parametrize("case", CASES)
def test_sglang_gets_options_it_has(case: str, tmp_path: Path) -> None:
    plan = CASES[case]
    nodes = 2 if plan.num_devices > 8 else 1
    starts = [call for node in range(nodes) for call in calls_of(plan, "sglang", "serve.sh", tmp_path, str(node))]
    servers = [parse(SGLANG, call["words"][2:]) for call in starts]
    assert all(call["words"][:2] == ["-m", "sglang.launch_server"] for call in starts)
    for pool in plan.pools:
        layout = pool.layout
        assert any(
            (server["tp-size"], server["pp-size"]) == (layout.stage_devices, layout.pp)
            and server["max-running-requests"] == LIMITS.max_batch * layout.attention_dp
            and server["chunked-prefill-size"] == 2048 * layout.attention_dp
            for server in servers
        )
    for call in calls_of(plan, "sglang", "load.sh", tmp_path):
        assert parse(SGLANG_BENCH, call["words"][2:])["random-input-len"] == 1000


@pytest.mark.parametrize("case", CASES)
def test_tensorrt_llm_gets_fields_it_has(case: str, tmp_path: Path) -> None:
    plan = CASES[case]
    starts = calls_of(plan, "trtllm", "serve.sh", tmp_path, "0")
    files = dict(export(plan, "trtllm").files)
    for pool in plan.pools:
        content = yaml.safe_load(files[f"{pool.role}.yaml"])
        require_fields(TRTLLM, content)
        assert content["tensor_parallel_size"] == pool.layout.stage_devices
        assert content["kv_cache_config"]["max_tokens"] == LIMITS.cache_blocks * LIMITS.block_size
    if case == "two nodes":
        [launch] = starts
        assert launch["tool"] == "mpirun" and "10.0.0.1:8,10.0.0.2:8" in launch["words"]
        assert not calls_of(plan, "trtllm", "serve.sh", tmp_path, "1"), "mpirun starts what runs there"
    else:
        assert all(call["tool"] == "trtllm-serve" and call["words"][-1].endswith(".yaml") for call in starts)
    for call in calls_of(plan, "trtllm", "load.sh", tmp_path):
        assert parse(TRTLLM_BENCH, call["words"][2:])["random-output-len"] == 100


def test_instances_share_no_device_and_no_port(tmp_path: Path) -> None:
    seen: set[tuple[int, str]] = set()
    ports: set[tuple[int, str]] = set()
    for node in range(2):
        for call in calls_of(AGGREGATED, "vllm", "serve.sh", tmp_path, str(node)):
            devices = call["env"]["CUDA_VISIBLE_DEVICES"].split(",")
            assert len(devices) == 4
            assert not seen & {(node, device) for device in devices}
            seen |= {(node, device) for device in devices}
            ports.add((node, parse(VLLM, call["words"][2:])["port"]))  # type: ignore[arg-type]
    assert len(seen) == 16 and len(ports) == 4


def test_prefill_and_decode_of_vllm_meet_and_the_router_knows_both(tmp_path: Path) -> None:
    servers = calls_of(DISAGGREGATED, "vllm", "serve.sh", tmp_path, "0", HOSTS="127.0.0.1")
    assert len(servers) == 3
    side = [call["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for call in servers]
    assert len(set(side)) == 3
    for call in servers:
        assert parse(VLLM, call["words"][2:])["kv-transfer-config"] == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }
    [router] = calls_of(DISAGGREGATED, "vllm", "router.sh", tmp_path, HOSTS="127.0.0.1")
    words = router["words"]
    listening = {f"http://127.0.0.1:{parse(VLLM, call['words'][2:])['port']}" for call in servers}
    assert {words[idx + 1] for idx, word in enumerate(words) if word in ("--prefill", "--decode")} == listening
    assert words.count("--prefill") == 2 and words.count("--decode") == 1


def test_prefill_and_decode_of_sglang_meet_at_bootstrap_ports(tmp_path: Path) -> None:
    servers = [
        parse(SGLANG, call["words"][2:])
        for call in calls_of(DISAGGREGATED, "sglang", "serve.sh", tmp_path, "0", HOSTS="h")
    ]
    prefills = {
        f"http://h:{server['port']}": str(server["disaggregation-bootstrap-port"])
        for server in servers
        if server["disaggregation-mode"] == "prefill"
    }
    [router] = calls_of(DISAGGREGATED, "sglang", "router.sh", tmp_path, HOSTS="h")
    words = router["words"]
    assert {words[idx + 1]: words[idx + 2] for idx, word in enumerate(words) if word == "--prefill"} == prefills


def test_disaggregated_tensorrt_llm_names_its_servers(tmp_path: Path) -> None:
    content = yaml.safe_load(dict(export(DISAGGREGATED, "trtllm").files)["disaggregated.yaml"])
    servers = calls_of(DISAGGREGATED, "trtllm", "serve.sh", tmp_path, "0", HOSTS="localhost")
    ports = {call["words"][call["words"].index("--port") + 1] for call in servers}
    sections = [content["context_servers"], content["generation_servers"]]
    assert {url.split(":")[1] for section in sections for url in section["urls"]} == ports
    assert all(section["num_instances"] == len(section["urls"]) for section in sections)


def test_data_parallel_ranks_over_nodes(tmp_path: Path) -> None:
    plan = serving_plan(pool_of(attention_dp=16, ep=16, replicas=1), model="deepseek-v3")
    [first] = (parse(VLLM, call["words"][2:]) for call in calls_of(plan, "vllm", "serve.sh", tmp_path, "0"))
    [second] = (parse(VLLM, call["words"][2:]) for call in calls_of(plan, "vllm", "serve.sh", tmp_path, "1"))
    assert "headless" not in first and second["headless"] and second["data-parallel-start-rank"] == 8
    assert first["data-parallel-size-local"] == second["data-parallel-size-local"] == 8
    assert first["data-parallel-address"] == second["data-parallel-address"] == "10.0.0.1"


HOSTILE = """it's "x" $(touch pwned) `touch pwned`; touch pwned & # {{ x }}: [1]\n!!python/object *a | > %"""


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("plan", [AGGREGATED, DISAGGREGATED], ids=["aggregated", "disaggregated"])
def test_names_are_words_and_nothing_else(engine: str, plan: ServingPlan, tmp_path: Path) -> None:
    hostile = plan.replace(model=plan.model.replace(name=HOSTILE, source=""))
    for node in range(2 if plan is AGGREGATED else 1):
        for call in calls_of(hostile, engine, "serve.sh", tmp_path, str(node)):
            assert HOSTILE in call["words"]
    for call in calls_of(hostile, engine, "load.sh", tmp_path):
        assert HOSTILE in call["words"]
    assert not (tmp_path / "pwned").exists()
    for name, text in export(hostile, engine).files:
        if name.endswith(".yaml"):
            assert isinstance(yaml.safe_load(text), dict)


def test_hosts_and_nodes_that_are_missing_are_said(tmp_path: Path) -> None:
    done, calls = run_script(export(AGGREGATED, "vllm"), "serve.sh", tmp_path, "0", HOSTS="only-one")
    assert done.returncode == 2 and "must name 2 nodes" in done.stderr and not calls
    done, calls = run_script(export(AGGREGATED, "vllm"), "serve.sh", tmp_path, "7")
    assert done.returncode == 2 and "no node 7" in done.stderr and not calls


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("case", CASES)
def test_dynamo_deploys_what_its_types_have(case: str, engine: str) -> None:
    plan = CASES[case].replace(serving=CASES[case].serving.replace(engine=engine))
    manifest = yaml.safe_load(dict(export(plan, "dynamo").files)["deployment.yaml"])
    assert (manifest["apiVersion"], manifest["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    assert set(manifest["spec"]) <= {"backendFramework", "components", "env"}
    assert manifest["spec"]["backendFramework"] == engine
    frontend, *workers = manifest["spec"]["components"]
    assert frontend["type"] == "frontend"
    for pool, worker in zip(plan.pools, workers, strict=True):
        assert set(worker) <= {"name", "type", "replicas", "multinode", "podTemplate"}
        assert worker["replicas"] == pool.replicas and worker["type"] in ("worker", "prefill", "decode")
        [container] = worker["podTemplate"]["spec"]["containers"]
        nodes = worker.get("multinode", {"nodeCount": 1})["nodeCount"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) * nodes == pool.layout.num_devices
        assert container["name"] == "main" and container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        assert parse(DYNAMO[engine], container["args"])


def test_llm_d_has_values_of_its_chart() -> None:
    exported = export(DISAGGREGATED, "llm-d")
    values = yaml.safe_load(dict(exported.files)["values.yaml"])
    assert values["modelArtifacts"]["name"] == "meta-llama/Llama-3.1-8B"
    assert values["routing"]["proxy"]["enabled"] and not values["multinode"]
    for role, pool in zip(("prefill", "decode"), DISAGGREGATED.pools, strict=True):
        section = values[role]
        assert section["replicas"] == pool.replicas and section["parallelism"]["tensor"] == pool.layout.tp
        [container] = section["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(pool.layout.num_devices)}
        made = parse(VLLM, container["args"])
        assert "tensor-parallel-size" not in made, "the chart adds it"
        assert made["kv-transfer-config"]
    scheduler = yaml.safe_load(dict(exported.files)["scheduler.yaml"])
    assert scheduler["kind"] == "EndpointPickerConfig"
    known = {plugin["type"] for plugin in scheduler["plugins"]}
    assert all(
        entry["pluginRef"] in known for profile in scheduler["schedulingProfiles"] for entry in profile["plugins"]
    )


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_loads_of_kubernetes_need_an_address(target: str, tmp_path: Path) -> None:
    calls_of(DISAGGREGATED, target, "load.sh", tmp_path, HOSTS="")  # Kubernetes knows the nodes
    [call] = calls_of(AGGREGATED, target, "load.sh", tmp_path, URL="http://127.0.0.1:9")
    assert parse(AIPERF, call["words"][1:])["url"] == "http://127.0.0.1:9"
    done, calls = run_script(export(AGGREGATED, target), "load.sh", tmp_path, URL="")
    assert done.returncode or not calls


def test_classes_of_a_load_in_flight_share_it(tmp_path: Path) -> None:
    classes = (
        RequestClass(share=0.75, prompt_len=100, output_len=10),
        RequestClass(share=0.25, prompt_len=900, output_len=20),
    )
    plan = serving_plan(pool_of(replicas=1), load=Requests(classes=classes, concurrency=40))
    loads = [parse(VLLM_BENCH, call["words"][2:]) for call in calls_of(plan, "vllm", "load.sh", tmp_path)]
    assert sorted(load["max-concurrency"] for load in loads) == [10, 30]  # type: ignore[type-var]
    assert "request-rate" not in loads[0]


def test_what_an_engine_cannot_do_is_refused_with_its_limit() -> None:
    cut = serving_plan(pool_of(tp=4, attention_dp=2, ep=2), model="deepseek-v3")
    with pytest.raises(ConfigError, match=r"vllm .* cannot run") as refused:
        export(cut, "vllm")
    assert "[experts_of_stage]" in refused.value.details[0]
    with pytest.raises(ConfigError) as refused:
        export(cut, "trtllm")
    assert "[attention_whole]" in refused.value.details[0]
    assert export(cut, "sglang").engine == "sglang"
    with pytest.raises(ConfigError, match="takes no plan for serving"):
        export(cut, "megatron")
    answers = exportable(EXPERTS)
    assert tuple(answers) == SERVING_TARGETS and answers["vllm"] is None
    named = EXPERTS.replace(model=EXPERTS.model.replace(name="a {{ b }}", source=""))
    with pytest.raises(ConfigError) as refused:
        export(named, "llm-d")
    assert "[model_name]" in refused.value.details[0]


def test_drafts_are_told_to_each_engine_or_refused(tmp_path: Path) -> None:
    own = Speculation(method="mtp", draft_tokens=2, accept=0.8)
    plan = serving_plan(pool_of(tp=8, speculate=own))
    words = parse(VLLM, calls_of(plan, "vllm", "serve.sh", tmp_path / "vllm")[0]["words"][2:])
    assert words["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 2}
    other = own.replace(method="draft", model="llama-3.2-1b")
    plan = serving_plan(pool_of(tp=8, speculate=other))
    words = parse(SGLANG, calls_of(plan, "sglang", "serve.sh", tmp_path / "sglang")[0]["words"][2:])
    assert words["speculative-algorithm"] == "STANDALONE" and words["speculative-num-draft-tokens"] == 3
    assert words["speculative-draft-model-path"] == "meta-llama/Llama-3.2-1B"
    with pytest.raises(ConfigError, match="the model's own alone"):
        export(plan, "trtllm")
    content = yaml.safe_load(dict(export(serving_plan(pool_of(tp=8, speculate=own)), "trtllm").files)["agg.yaml"])
    require_fields(TRTLLM, content)
    assert content["speculative_config"] == {"decoding_type": "MTP", "num_nextn_predict_layers": 2}
    with pytest.raises(ConfigError, match="knows no name"):
        export(serving_plan(pool_of(tp=8, speculate=own.replace(method="eagle3"))), "vllm")


def test_prefixes_with_the_host_are_told_to_each_engine_or_refused(tmp_path: Path) -> None:
    plan = serving_plan(pool_of(tp=2, replicas=1, prefixes="host", host_prefix_bytes=3 * 10**9))
    words = parse(VLLM, calls_of(plan, "vllm", "serve.sh", tmp_path / "vllm")[0]["words"][2:])
    assert words["kv-offloading-size"] == 6 and "enable-prefix-caching" in words
    words = parse(SGLANG, calls_of(plan, "sglang", "serve.sh", tmp_path / "sglang")[0]["words"][2:])
    assert words["hicache-size"] == 3 and "hicache-storage-backend" not in words
    content = yaml.safe_load(dict(export(plan, "trtllm").files)["agg.yaml"])
    require_fields(TRTLLM, content)
    assert content["kv_cache_config"]["host_cache_size"] == 3 * 10**9
    drives = plan.replace(pools=(plan.pools[0].replace(prefixes="storage"),))
    words = parse(SGLANG, calls_of(drives, "sglang", "serve.sh", tmp_path / "drives")[0]["words"][2:])
    assert words["hicache-storage-backend"] == "file"
    for engine in ("vllm", "trtllm"):
        with pytest.raises(ConfigError, match="lie in storage"):
            export(drives, engine)
    computed = plan.replace(pools=(pool_of(tp=2, replicas=1, prefixes="none"),))
    assert "--no-enable-prefix-caching" in calls_of(computed, "vllm", "serve.sh", tmp_path / "none")[0]["words"]


def test_nano_batches_are_told_to_each_engine(tmp_path: Path) -> None:
    pool = pool_of(attention_dp=8, ep=8, weights="fp8", cache="fp8", replicas=1, nano_batch_rows=99)
    plan = serving_plan(pool, model="deepseek-v3", nano_batches=True)
    words = parse(VLLM, calls_of(plan, "vllm", "serve.sh", tmp_path / "vllm")[0]["words"][2:])
    assert words["enable-dbo"] is True and words["dbo-decode-token-threshold"] == 99
    words = parse(SGLANG, calls_of(plan, "sglang", "serve.sh", tmp_path / "sglang")[0]["words"][2:])
    assert words["enable-two-batch-overlap"] is True and words["moe-a2a-backend"] == "deepep"
    with pytest.raises(ConfigError, match="nano-batches"):
        export(plan, "trtllm")


def test_experts_that_the_host_computes_are_told_to_sglang_and_all_else_is_refused(tmp_path: Path) -> None:
    placed = ExpertsOnHost(share=0.75, by="compute")
    pool = pool_of(tp=2, replicas=1, weights="int4", experts_on_host=placed, host_expert_bytes=10**11)
    plan = serving_plan(pool, model="deepseek-v3", experts_on_host=placed)
    kernels = {"KT_WEIGHTS": "/weights for the host", "KT_THREADS": "30"}
    call = calls_of(plan, "sglang", "serve.sh", tmp_path, **kernels)[0]
    words = parse(SGLANG, call["words"][2:])
    assert words["kt-num-gpu-experts"] == 64 and words["kt-method"] == "AMXINT4"
    assert words["kt-weight-path"] == "/weights for the host" and words["kt-cpuinfer"] == 30
    exported = export(plan, "sglang")
    assert any("the most visited" in line for line in exported.not_expressed)
    assert any(line.startswith("KT_WEIGHTS") for line in exported.to_set)
    for change, says in (
        ({"experts_on_host": placed.replace(by="balance")}, "split by=balance"),
        ({"experts_on_host": placed.replace(by="copy")}, "split by=copy"),
        ({"weights": "fp8"}, "in fp8, of which it has int4 and int8"),
        ({"layout": ServingLayout(tp=2, ep=2)}, "tp alone"),
        ({"layout": ServingLayout(tp=16)}, "several nodes"),
    ):
        with pytest.raises(ConfigError) as refused:
            export(plan.replace(pools=(pool.replace(**change),)), "sglang")
        assert says in refused.value.details[0]
    for engine in ("vllm", "trtllm", "dynamo", "llm-d"):
        with pytest.raises(ConfigError) as refused:
            export(plan, engine)
        assert any("[no_experts_on_host]" in line for line in refused.value.details)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llm-d"])
def test_phases_that_share_devices_are_refused_by_name(engine: str) -> None:
    with pytest.raises(ConfigError) as refused:
        export(serving_plan(pool_of(tp=8, prefill_eighths=3)), engine)
    assert any("[no_shares]" in line and "3/8 of the multiprocessors" in line for line in refused.value.details)


def test_sglang_is_told_to_mix_where_the_plan_does(tmp_path: Path) -> None:
    words = calls_of(serving_plan(pool_of(tp=8), scheduler="mixed"), "sglang", "serve.sh", tmp_path)[0]["words"]
    assert parse(SGLANG, words[2:])["enable-mixed-chunk"] is True


def test_pools_that_do_not_lie_on_nodes_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        export(serving_plan(pool_of(tp=8, replicas=4)), "vllm")
    assert "[placed]" in refused.value.details[0]


def test_blocks_that_attention_on_cpus_does_not_take_are_refused() -> None:
    cluster = cpu_cluster(2)
    on_cpu = pool_of(replicas=1, device=cluster.groups[0].device.name)
    with pytest.raises(ConfigError) as refused:
        export(serving_plan(on_cpu, cluster=cluster), "vllm")
    assert "[cpu_blocks]" in refused.value.details[0]
    large = on_cpu.replace(limits=LIMITS.replace(block_size=32))
    assert export(serving_plan(large, cluster=cluster), "vllm").files


def test_weights_of_four_bits_need_a_checkpoint() -> None:
    exported = export(serving_plan(pool_of(weights="nvfp4")), "vllm")
    assert any("nvfp4" in line for line in exported.to_set)
    assert "--quantization" not in dict(exported.files)["serve.sh"]


@pytest.mark.job
@pytest.mark.parametrize("spelling", ["--to", "--engine"])
def test_the_command_writes_a_serving_plan(spelling: str, tmp_path: Path) -> None:
    TWO_NODES.save(tmp_path / "serve.json")
    command = [sys.executable, "-m", "meshwright.cli", "export", "serve.json", spelling, "vllm", "--out", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"serve.sh", "load.sh"}
    assert "next: cd made && bash serve.sh" in done.stderr
