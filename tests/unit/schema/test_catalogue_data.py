"""The shipped device and link catalogues are complete, plausible and agree with the survey they restate."""

import csv
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from loops import for_each

REPO_ROOT = Path(__file__).resolve().parents[3]
CATALOGUE = REPO_ROOT / "schema" / "catalogue"
SURVEY = REPO_ROOT.parent / "shared" / "data" / "devices"

GIB = 2**30
COLLECTIVES = {"p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
DTYPES = {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}

DEVICE_REQUIRED = {
    "aliases",
    "vendor",
    "architecture",
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "peak_flops_per_s",
    "scaleup",
    "scaleup_domain",
    "devices_per_node",
    "scaleout",
    "host_link_bytes_per_s",
    "source",
}
DEVICE_OPTIONAL = {
    "gemm",
    "num_sms",
    "cache_bytes",
    "power_limit_w",
    "die",
    "max_clock_ratio",
    "inline_ecc",
    "max_matmul_flops_per_s",
    "price_per_hour",
    "price_source",
}
LINK_FIELDS = {
    "kind",
    "title",
    "bandwidth_bytes_per_s",
    "shared_by",
    "latency_s",
    "efficiency",
    "collective_latency_s",
    "source",
}
LINK_OPTIONAL = {"ramp_s", "ring_step_s", "mesh_peers", "curve"}

# Our name -> (row of the survey, how many of our devices one row describes).
SURVEY_DEVICE = {
    "V100-SXM2-16GB": ("V100-SXM2-16", 1),
    "V100-SXM2-32GB": ("V100-SXM2-32", 1),
    "V100-PCIe-32GB": ("V100-PCIe-32", 1),
    "T4-16GB": ("T4", 1),
    "A100-SXM-80GB": ("A100-SXM-80", 1),
    "A100-SXM-40GB": ("A100-SXM-40", 1),
    "A100-PCIe-80GB": ("A100-PCIe-80", 1),
    "A100-PCIe-40GB": ("A100-PCIe-40", 1),
    "A40-48GB": ("A40", 1),
    "A10-24GB": ("A10", 1),
    "A10G-24GB": ("A10G", 1),
    "RTX-A6000-48GB": ("RTX-A6000", 1),
    "RTX3090-24GB": ("RTX3090", 1),
    "RTX4090-24GB": ("RTX4090", 1),
    "L4-24GB": ("L4", 1),
    "L40S-48GB": ("L40S", 1),
    "H100-SXM-80GB": ("H100-SXM", 1),
    "H100-PCIe-80GB": ("H100-PCIe", 1),
    "H100-NVL-94GB": ("H100-NVL", 1),
    "H800-SXM-80GB": ("H800-SXM", 1),
    "H20-96GB": ("H20", 1),
    "H200-SXM-141GB": ("H200-SXM", 1),
    "GH200-96GB": ("GH200-96", 1),
    "GH200-144GB": ("GH200-144", 1),
    "B200-SXM-180GB": ("B200-SXM", 1),
    "GB200-186GB": ("GB200", 1),
    "B300-SXM-268GB": ("B300-SXM", 1),
    "GB300-278GB": ("GB300", 1),
    "RTX5090-32GB": ("RTX5090", 1),
    "RTX-PRO-6000-Server-96GB": ("RTX-PRO-6000-Server", 1),
    "MI250X-GCD": ("MI250X (OAM, 2 GCD)", 2),
    "MI300X-192GB": ("MI300X", 1),
    "MI325X-256GB": ("MI325X", 1),
    "MI355X-288GB": ("MI355X", 1),
}

# What the survey lacks, or says in other units (chips of a torus): data sheets only.
NOT_SURVEYED = {
    "H100-SXM-96GB-HBM2e",
    "P100-SXM2-16GB", "A30-24GB", "A800-PCIe-80GB", "L40-48GB", "RTX6000-Ada-48GB", "H200-NVL-141GB", "MI210-64GB",
    "MI250-GCD", "MI350X-288GB", "MI300A-128GB", "L20-48GB", "Gaudi2-96GB", "Gaudi3-128GB", "TPU-v4", "TPU-v5e", "TPU-v5p",
    "TPU-v6e", "Trainium1-32GB", "Trainium2-96GB", "V100S-PCIe-32GB", "RTX2080Ti-11GB", "A800-SXM-80GB", "RTX3090Ti-24GB",
    "RTX-A5000-24GB", "RTX-A4000-16GB", "RTX4080-16GB", "H800-PCIe-80GB", "H20-141GB", "RTX5080-16GB",
    "RTX-PRO-6000-Workstation-96GB", "RTX-PRO-6000-MaxQ-96GB", "V100-PCIe-16GB", "TITAN-RTX-24GB", "Quadro-RTX-6000-24GB",
    "Quadro-RTX-8000-48GB", "RTX5000-Ada-32GB",
}  # fmt: skip

# (device, survey column) whose value we deliberately do not share, with the reason.
DEVICE_EXCEPTIONS = {
    ("B200-SXM-180GB", "fp32_tflops"): "HGX B200 sheet: 600 TFLOPS for eight = 75; the survey's 80 is an early edition",
    ("B300-SXM-268GB", "fp32_tflops"): "HGX B300 sheet: 600 TFLOPS for eight = 75; the survey's 80 is that of GB300",
}

# Our link -> row of the survey. xgmi3 and the *-bridge, *-quad, *-numa variants have no row of their own.
SURVEY_LINK = {
    "nvlink2": "NVLink2 (V100, cube mesh/DGX-1)",
    "nvlink3": "NVLink3+NVSwitch (A100)",
    "nvlink4": "NVLink4+NVSwitch (H100/H200), ring",
    "nvlink5": "NVLink5+NVSwitch (B200), ring",
    "nvlink5-nvl72": "NVLink5 NVL72 (GB200/GB300)",
    "nvlink-bridge": "NVLink bridge pair (A40/3090)",
    "xgmi4": "xGMI MI300X",
    "xgmi4-mi350": "xGMI MI350X/MI355X",
    "pcie3": "PCIe3 x16",
    "pcie4": "PCIe4 x16",
    "pcie5": "PCIe5 x16",
    "ib100": "InfiniBand EDR 100Gb/s",
    "ib200": "InfiniBand HDR 200Gb/s",
    "ib400": "InfiniBand NDR 400Gb/s",
    "ib800": "InfiniBand XDR 800Gb/s",
    "roce400": "RoCE v2 400GbE",
    "slingshot11": "HPE Slingshot-11 4x200Gb/s (Alps GH200)",
    "efa-v1": "AWS EFAv1 4x100Gb/s per node (p4d/p4de)",
    "efa-v2": "AWS EFAv2 32x100Gb/s per node (p5)",
    "efa-v4": "AWS EFAv4 8x400Gb/s per node (p6-b200)",
    "tcpxo": "GCP GPUDirect-TCPXO 8x200Gb/s (a3-mega)",
    "eth100": "Ethernet 100GbE TCP",
    "eth25": "Ethernet 25GbE TCP",
    "eth10": "Ethernet 10GbE TCP",
}


def _load(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((CATALOGUE / name).read_text(encoding="ascii"))


DEVICES = _load("devices.toml")
LINKS = _load("links.toml")


def _survey(name: str) -> dict[str, dict[str, str]]:
    path = SURVEY / name
    if not path.exists():
        pytest.skip(f"the device survey {name} is not part of the repository and is absent here")
    with path.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@for_each(DEVICES)
def test_device_has_exactly_the_documented_fields(name: str) -> None:
    fields = set(DEVICES[name])
    assert fields >= DEVICE_REQUIRED
    assert fields <= DEVICE_REQUIRED | DEVICE_OPTIONAL
    assert ("price_per_hour" in fields) == ("price_source" in fields)


@for_each(LINKS)
def test_link_has_exactly_the_documented_fields(name: str) -> None:
    assert LINK_FIELDS <= set(LINKS[name]) <= LINK_FIELDS | LINK_OPTIONAL
    assert name == name.lower()


@for_each(DEVICES)
def test_device_references_resolve_to_links_of_the_right_kind(name: str) -> None:
    device = DEVICES[name]
    assert LINKS[device["scaleup"]]["kind"] == "scale-up"
    assert LINKS[device["scaleout"]]["kind"] == "scale-out"


def test_names_and_aliases_are_unique_ignoring_case() -> None:
    names = [spelling.casefold() for name, device in DEVICES.items() for spelling in (name, *device["aliases"])]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@for_each(DEVICES)
def test_device_figures_are_in_plausible_units(name: str) -> None:
    device = DEVICES[name]
    assert device["vendor"] in {"nvidia", "amd", "google", "intel", "aws"}
    assert device["architecture"]
    assert isinstance(device["memory_bytes"], int)
    assert 8 * GIB <= device["memory_bytes"] <= 600 * GIB
    for field in ("memory_bandwidth_bytes_per_s", "host_link_bytes_per_s"):
        assert 1e8 <= device[field] <= 1e13
    assert 1 <= device["devices_per_node"] <= device["scaleup_domain"] <= 72
    assert 0.05 <= device.get("price_per_hour", 1.0) <= 50


@for_each(DEVICES)
def test_device_peaks_are_dense_and_ordered(name: str) -> None:
    device = DEVICES[name]
    peaks = device["peak_flops_per_s"]
    assert {"fp32", "fp16"} <= set(peaks) <= DTYPES
    assert all(1e12 <= peak <= 2e16 for peak in peaks.values())
    if device["vendor"] not in ("nvidia", "amd"):
        assert peaks["bf16"] == peaks["fp16"]
        return
    if device["architecture"] in {"pascal", "volta", "turing"}:
        assert not {"bf16", "tf32", "fp8"} & set(peaks)
    else:
        assert peaks["bf16"] == peaks["fp16"]
        # The matrix units do half as many tf32 and twice as many fp8 operations as bf16: a sparse figure shows as 4x.
        assert 1.9 <= peaks["bf16"] / peaks.get("tf32", peaks["bf16"] / 2) <= 2.1
        assert 1.9 <= peaks.get("fp8", 2 * peaks["bf16"]) / peaks["bf16"] <= 2.1
    for dtype, rate in device.get("max_matmul_flops_per_s", {}).items():
        assert 0.4 * peaks[dtype] <= rate <= peaks[dtype]


@for_each(DEVICES)
def test_processors_and_cache_are_plausible(name: str) -> None:
    device = DEVICES[name]
    assert ("num_sms" in device) == ("cache_bytes" in device) == (device["vendor"] in {"nvidia", "amd"})
    if "num_sms" not in device:
        return
    assert 40 <= device["num_sms"] <= 304
    assert 4 * 2**20 <= device["cache_bytes"] <= 256 * 2**20


@for_each(LINKS)
def test_link_figures_are_in_plausible_units(name: str) -> None:
    link = LINKS[name]
    assert link["kind"] in {"scale-up", "scale-out"}
    assert link["shared_by"] in {"device", "node", "host"}
    assert 1e8 <= link["bandwidth_bytes_per_s"] <= 1e13
    assert 1e-7 <= link["latency_s"] <= 1e-3
    assert set(link["efficiency"]) == COLLECTIVES
    assert all(0 < fraction <= 1.2 for fraction in link["efficiency"].values())
    assert set(link["collective_latency_s"]) == {"base", "per_hop"}
    assert all(1e-7 <= latency <= 1e-3 for latency in link["collective_latency_s"].values())


@pytest.mark.parametrize("table", [DEVICES, LINKS], ids=["devices", "links"])
def test_every_entry_names_its_source(table: dict[str, dict[str, Any]]) -> None:
    for name, entry in table.items():
        texts = [entry["source"], entry.get("price_source", "-")]
        assert all(isinstance(text, str) and text.strip() for text in texts), name


def test_survey_mapping_covers_every_device() -> None:
    assert set(SURVEY_DEVICE) == set(DEVICES) - NOT_SURVEYED
    assert {device for device, _ in DEVICE_EXCEPTIONS} <= set(DEVICES)


@for_each(SURVEY_DEVICE)
def test_device_agrees_with_the_survey_within_five_percent(name: str) -> None:
    row_name, devices_per_row = SURVEY_DEVICE[name]
    row = _survey("devices.csv")[row_name]
    device = DEVICES[name]
    ours = {f"{dtype}_tflops": peak / 1e12 for dtype, peak in device["peak_flops_per_s"].items()}
    ours["mem_bw_GBps"] = device["memory_bandwidth_bytes_per_s"] / 1e9

    for column in ("mem_bw_GBps", *(f"{dtype}_tflops" for dtype in sorted(DTYPES))):
        theirs = float(row[column]) / devices_per_row if row[column] else None
        agrees = (
            column not in ours
            if theirs is None
            else column in ours and math.isclose(ours[column], theirs, rel_tol=0.05)
        )
        excepted = (name, column) in DEVICE_EXCEPTIONS
        assert agrees != excepted, f"{column}: {ours.get(column)} here, {theirs} in the survey, excepted: {excepted}"


@for_each(SURVEY_DEVICE)
def test_device_memory_is_below_the_survey_capacity_but_not_by_much(name: str) -> None:
    row_name, devices_per_row = SURVEY_DEVICE[name]
    nominal_gib = float(_survey("devices.csv")[row_name]["mem_GB"]) / devices_per_row
    assert 0.90 * nominal_gib <= DEVICES[name]["memory_bytes"] / GIB <= nominal_gib


@for_each(SURVEY_LINK)
def test_link_rate_agrees_with_the_survey_within_five_percent(name: str) -> None:
    row = _survey("interconnects.csv")[SURVEY_LINK[name]]
    assert LINKS[name]["kind"] == row["kind"]
    theirs = float(row["per_gpu_or_nic_GBps_unidir"])
    assert math.isclose(LINKS[name]["bandwidth_bytes_per_s"] / 1e9, theirs, rel_tol=0.05)
