"""Clusters of rows: spellings of devices, descriptions of networks, and the tables behind them."""

from __future__ import annotations

import pytest
from meshwright.schema.catalogue import device_entries, link_entries
from meshwright.validation.clusters import device_named, network_link
from meshwright.validation.rows import read_table
from run_rows import inputs_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("A100 40GB PCIe", "A100-PCIe-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"), ("GB200 NVL72", "GB200-186GB"), ("H200 NVL", "H200-NVL-141GB"),
        ("TPU v5p", "TPU-v5p"), ("Intel Gaudi 3", "Gaudi3-128GB"), ("abacus", None), ("", None),
    ],
)  # fmt: skip
def test_device_spellings(text: str, name: str | None) -> None:
    assert device_named(text) == name


def test_tables_name_what_the_catalogue_has_and_state_their_sources() -> None:
    assert {line["device"] for line in read_table("devices")} <= set(device_entries())
    links = {name for line in read_table("networks") for name in line["links"].split()}
    assert links | {line["scaleup"] for line in read_table("devices")} - {""} <= set(link_entries())
    for name in ("devices", "networks", "families", "shapes", "words", "experts"):
        assert all(line["source"] for line in read_table(name)), name


@pytest.mark.parametrize(
    ("text", "link", "gbit"),
    [
        ("InfiniBand NDR 400Gb/s per GPU (reference; not stated in table)", "ib400", 400),
        ("4x HDR InfiniBand = 800 Gb/s per node (config inter_node_bandwidth=800)", "ib200", 100),
        ("8x 200Gb/s HDR InfiniBand per node", "ib200", 200),
        ("4x Omni-Path 100 Gb/s per node (tr11 README)", "opa100", 50),
        ("4x100Gb RoCE per node", "roce100", 50),
        ("RoCE 1600 Gbps per node", "roce200", 200),
        ("EFA (AWS p5; 3200 Gb/s per node nominal)", "efa-v2", 400),
        ("EFA 400 Gb/s per node", "efa-v1", 50),
        ("8x50 GB/s", "ib400", 400),
        ("8x 50 GB/s RoCE", "roce400", 400),
        ("400 GB/s per node InfiniBand", "ib400", 400),
        ("InfiniBand 25 GB/s a GPU", "ib200", 200),
        ("3.2 Tb/s RDMA", "ib400", 400),
        ("1x Ethernet 10GB/Sec", "eth10", 10),
        ("GCP A3: 4x200 Gb/s TCP(X) (weak)", "tcpx", 100),
        ("100 Gbps Ethernet (not stated in repo)", "eth100", 100),
        (
            "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s NIC",
            "ib400",
            400,
        ),
        ("InfiniBand; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", "ib400", 400),
        ("not stated", "ib400", 400),
        ("Management: 1x Ethernet 10GB/Sec", "ib400", 400),
        ("1x Ethernet 100Gb/Sec, 8x NVIDIA Quantum-2 CX7 InfiniBand (400Gb/s)", "ib400", 400),
        ("6 x BCM57508 NetXtreme-E 10Gb/25Gb/100Gb/200Gb Ethernet, 2 x X710 for 10GBASE-T", "roce200", 150),
        ("10G Ethernet", "eth10", 10),
        ("25GbE", "eth25", 25),
        ("100GbE InfiniBand", "ib400", 400),
        ("InfiniBand 25 GB/s per GPU", "ib200", 200),
        ("AWS p4d.24xlarge", "efa-v1", 50),
        ("EFA v3 (p5en)", "efa-v3", 400),
        ("GCP A3 Mega, GPUDirect-TCPXO", "tcpxo", 200),
        ("JUWELS Booster, 4 x HDR200", "ib200", 200),
        ("Alps", "slingshot11", 200),
        ("Frontier (4 x Slingshot-11 for 8 GCDs)", "slingshot11-gcd", 100),
    ],
)
def test_network_text_gives_a_link_and_the_rate_of_one_device(text, link, gbit) -> None:
    linked = network_link(text, devices_per_node=8, default="ib400")
    assert linked.name == link
    assert linked.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(gbit)


def test_drives_give_the_node_its_storage() -> None:
    groups = inputs_of(offload="params to NVMe, 2 SSDs", sharding_class="zero3", pp=1, dp=8).cluster.groups
    assert groups[0].storage_bytes_per_s == 2 * 4.5e9
