"""Every spelling of a cluster, and that every misspelling is a ConfigError."""

from __future__ import annotations

import statistics
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshwright.schema import ClusterSpec, ConfigError
from meshwright.schema import cluster_files as module
from meshwright.schema.catalogue import device_entries, link_entries
from meshwright.schema.cluster_files import DEFAULT_EFFICIENCY
from meshwright.schema.units import GIB

LAB = """
name = "lab"
reserved_gib = 1.5
bandwidth_matrix = [[0, 5e10], [5e10, 0]]

[[groups]]
device = "a100-sxm-80gb"
num_nodes = 2
host_memory_gib = 1024

[[levels]]
link = "nvlink3"
domain_size = 8

[[levels]]
link = { bandwidth_bytes_per_s = 5e10, latency_s = 1e-5, efficiency = { p2p = 0.9 } }
domain_size = 16
"""

OWN_DEVICE = """
[[groups]]
device = { name = "accelerator", memory_gib = 16, memory_bandwidth_bytes_per_s = 1e12, peak_flops_per_s = { bf16 = 1e14 } }
num_nodes = 1
devices_per_node = 4
"""


def levels_of(cluster: ClusterSpec) -> list[tuple[str, int]]:
    return [(level.link.name, level.domain_size) for level in cluster.levels]


def parse_file(folder: Path, text: str | bytes, name: str = "cluster.toml") -> ClusterSpec:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ClusterSpec.parse(str(path))


# --- shorthand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "nodes", "levels"),
    [
        ("256xH100-SXM-80GB", "256xH100-SXM-80GB", (32, 8), [("nvlink4", 8), ("ib400", 256)]),
        ("8X8xh100/IB200", "8x8xH100-SXM-80GB/ib200", (8, 8), [("nvlink4", 8), ("ib200", 64)]),
        (" 4xH100 ", "4xH100-SXM-80GB", (1, 4), [("nvlink4", 4)]),
        ("1xH100", "1xH100-SXM-80GB", (1, 1), [("nvlink4", 1)]),
        ("2x4xH100", "2x4xH100-SXM-80GB", (2, 4), [("nvlink4", 4), ("ib400", 8)]),
        ("8x1xH100", "8x1xH100-SXM-80GB", (8, 1), [("ib400", 8)]),
        ("8x4090", "8xRTX4090-24GB", (2, 4), [("pcie4-nop2p", 4), ("eth10", 8)]),
        ("8x8x4090", "8x8xRTX4090-24GB", (8, 8), [("pcie4-nop2p", 8), ("eth10", 64)]),
        ("8xH100/ib400", "8xH100-SXM-80GB/ib400", (1, 8), [("nvlink4", 8)]),
    ],
)
def test_shorthand_gives_nodes_and_links(text, name, nodes, levels):
    cluster = ClusterSpec.parse(text)
    assert (cluster.name, (cluster.num_nodes, cluster.largest_node)) == (name, nodes)
    assert levels_of(cluster) == levels


@pytest.mark.parametrize(("count", "domain"), [(4, 4), (72, 72), (144, 72), (256, 64), (576, 72), (100, 20)])
def test_rack_scale_link_spans_the_most_whole_nodes_that_nest(count, domain):
    cluster = ClusterSpec.parse(f"{count}xGB200")
    assert cluster.largest_node == 4
    assert cluster.scaleup_domain == domain


@pytest.mark.parametrize("name", sorted(device_entries()))
def test_every_catalogue_device_makes_clusters(name):
    entry = device_entries()[name]
    for count in (1, entry["devices_per_node"], 16 * entry["devices_per_node"]):
        cluster = ClusterSpec.parse(f"{count}x{name}")
        assert cluster.num_devices == count
        assert cluster.groups[0].device.name == name
        assert cluster.memory_budget_bytes > 0
        assert ClusterSpec(**cluster.model_dump()) == cluster


@pytest.mark.parametrize("key", sorted(key for key, entry in link_entries().items() if entry["kind"] == "scale-out"))
def test_every_network_can_be_named(key):
    assert levels_of(ClusterSpec.parse(f"16xH100/{key}"))[-1] == (key, 16)


def test_count_that_does_not_fill_nodes_suggests_three_ways_out():
    with pytest.raises(ConfigError) as caught:
        ClusterSpec.parse("12xH100-SXM-80GB")
    suggestions = ["8xH100-SXM-80GB", "16xH100-SXM-80GB", "2x6xH100-SXM-80GB"]
    for suggestion in suggestions:
        assert suggestion in str(caught.value)
        ClusterSpec.parse(suggestion)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "local:4"),
        ("   ", "8x8xH100-SXM-80GB/ib400"),
        ("\0", "cluster.toml"),
        ("H100", "did you mean 8xH100-SXM-80GB?"),
        ("H100-SXM", "did you mean 8xH100-SXM-80GB?"),
        ("locl", "did you mean local?"),
        ("0xH100", "at least one"),
        ("0x8xH100", "at least one"),
        ("-3xH100", "is not a cluster"),
        ("1e9xH100", "is not a cluster"),
        ("8.5xH100", "is not a cluster"),
        ("99999999xH100", "10000000"),
        ("9999999x9999999xH100", "10000000"),
        ("9" * 3000 + "xH100", "an integer of 9966 bits"),
        ("9" * 5000 + "xH100", "is not a cluster"),
        ("8xH1000", "did you mean H100"),
        ("8xH10", "did you mean H100"),
        ("8xH100/ib40", "did you mean ib400"),
        ("8xH100/nvlink4", "inside a node"),
        ("8xH100/", "is not a cluster"),
        ("local:", "number of ranks"),
        ("local:many", "number of ranks"),
        ("local:-1", "number of ranks"),
        ("local:0", "at least 1"),
        ("/dev/zero", "special file"),
        ("missing.toml", "no cluster file"),
        ("a" * 300 + ".toml", "no cluster file"),
    ],
)
def test_misspelled_cluster_is_a_config_error(text, expected):
    with pytest.raises(ConfigError) as caught:
        ClusterSpec.parse(text)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 1000


# --- files -------------------------------------------------------------------------------------------------------


def test_file_says_what_storage_reads_and_refuses_what_is_no_rate(tmp_path):
    text = LAB.replace("num_nodes", "storage_bytes_per_s = 1.4e9\nnum_nodes", 1)
    assert parse_file(tmp_path, text).groups[0].storage_bytes_per_s == 1.4e9
    for wrong in ("0", "-1e9", '"fast"'):
        with pytest.raises(ConfigError, match="storage_bytes_per_s"):
            parse_file(tmp_path, text.replace("1.4e9", wrong, 1))


def test_file_gives_all_that_it_says(tmp_path):
    cluster = parse_file(tmp_path, LAB)
    assert (cluster.name, cluster.num_devices, cluster.reserved_bytes) == ("lab", 16, 3 * 2**29)
    assert cluster.groups[0].host_memory_bytes == 2**40
    assert cluster.groups[0].host_link_bytes_per_s == device_entries()["A100-SXM-80GB"]["host_link_bytes_per_s"]
    outer = cluster.levels[1].link
    assert (outer.kind, outer.name) == ("scale-out", "link-16")
    assert outer.efficiency.p2p == 0.9
    assert outer.efficiency.all_reduce == DEFAULT_EFFICIENCY["all_reduce"]
    assert outer.collective_latency_s.base == 1e-5
    assert cluster.bandwidth_matrix == ((0, 5e10), (5e10, 0))


def test_file_without_toml_in_its_name_is_read(tmp_path):
    assert parse_file(tmp_path, LAB, "lab.txt").name == "lab"


def test_file_without_levels_takes_them_from_the_catalogue(tmp_path):
    text = (
        '[[groups]]\ndevice = "H100"\nnum_nodes = 4\n[[groups]]\ndevice = "A100"\nnum_nodes = 2\ndevices_per_node = 4\n'
    )
    cluster = parse_file(tmp_path, text, "mixed.toml")
    assert cluster.name == "mixed"
    assert levels_of(cluster) == [("nvlink3", 4), ("ib200", 40)]  # the weaker links, the domain that is in both nodes


def test_own_device_needs_levels(tmp_path):
    with pytest.raises(ConfigError, match="levels"):
        parse_file(tmp_path, OWN_DEVICE)
    cluster = parse_file(tmp_path, OWN_DEVICE + '[[levels]]\nlink = "pcie4"\ndomain_size = 4\n')
    assert cluster.groups[0].device.memory_bytes == 2**34
    assert cluster.groups[0].device.vendor == "other"


@pytest.mark.parametrize(("architecture", "said"), [("hoper", "hopper"), ("Ampere", "ampere"), ("amper", "ampere")])
def test_misspelt_architecture_is_refused_and_an_unknown_one_is_not(tmp_path, architecture, said):
    links = '[[levels]]\nlink = "pcie4"\ndomain_size = 4\n'
    with pytest.raises(ConfigError, match=f"unknown architecture '{architecture}'") as caught:
        parse_file(tmp_path, OWN_DEVICE.replace("name =", f'architecture = "{architecture}", name =', 1) + links)
    assert f"did you mean {said}" in str(caught.value)
    own = parse_file(tmp_path, OWN_DEVICE.replace("name =", 'architecture = "our-own", name =', 1) + links)
    assert own.groups[0].device.architecture == "our-own"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"a100-sxm-80gb"', '"a100-sxm-81gb"', "did you mean A100"),
        ('"a100-sxm-80gb"', "7", "groups[0]: `device`"),
        ('"nvlink3"', '"nvlnk3"', "did you mean nvlink"),
        ("num_nodes = 2", "num_nodes = true", "`num_nodes` must be a whole number"),
        ("num_nodes = 2", 'num_nodes = "2"', "`num_nodes` must be a whole number"),
        ("num_nodes = 2", "num_nodes = 0", "`num_nodes` must be a whole number"),
        ("num_nodes = 2", "num_node = 2", "did you mean num_nodes?"),
        ("num_nodes = 2\n", "", "`num_nodes` is missing"),
        ("num_nodes = 2", f"num_nodes = {'9' * 5000}", "not valid TOML"),
        ("num_nodes = 2", f"num_nodes = {'9' * 4000}", "not an integer of 13288 bits"),
        ("domain_size = 16", "domain_size = 12", "nest"),
        ("domain_size = 16", "domain_size = 8", "nest"),
        ("reserved_gib = 1.5", "reserved_gib = nan", "no size of memory"),
        ("reserved_gib = 1.5", "reserved_gib = 1e300", "no size of memory"),
        ("reserved_gib = 1.5", "reserved_gib = 500", "reserved_bytes"),
        ("reserved_gib = 1.5", "reserved_gib = 1\nreserved_bytes = 1", "both given"),
        ("latency_s = 1e-5", "latency_s = true", "no time in seconds"),
        (", latency_s = 1e-5", "", "latency_s"),
        ("bandwidth_bytes_per_s = 5e10", "bandwidth_bytes_per_s = inf", "bandwidth_bytes_per_s"),
        ("bandwidth_bytes_per_s = 5e10", f"bandwidth_bytes_per_s = {'9' * 400}", "bandwidth_bytes_per_s"),
        ("p2p = 0.9", "p3p = 0.9", "p3p"),
        ("[[0, 5e10], [5e10, 0]]", "[[0, 5e10]]", "2 x 2"),
        ("[[groups]]", "[groups]", "[[groups]]"),
        ("[[groups]]", "[[groups", "not valid TOML"),
        ('name = "lab"', "name = []", "name"),
    ],
)
def test_wrong_field_in_file_is_a_config_error(tmp_path, old, new, expected):
    assert old in LAB
    with pytest.raises(ConfigError) as caught:
        parse_file(tmp_path, LAB.replace(old, new))
    assert expected in str(caught.value)
    assert "cluster.toml" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"\x89PNG\r\n\x1a\n" * 100, b"a = " + b"[" * 100_000])
def test_unusable_file_is_a_config_error(tmp_path, content):
    with pytest.raises(ConfigError):
        parse_file(tmp_path, content)


def test_directory_is_a_config_error(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    for path in (tmp_path, tmp_path / "folder.toml"):
        with pytest.raises(ConfigError, match="is a directory"):
            ClusterSpec.parse(str(path))


def test_default_efficiencies_are_near_the_catalogues_medians():
    for op, value in DEFAULT_EFFICIENCY.items():
        median = statistics.median(entry["efficiency"][op] for entry in link_entries().values())
        assert value == pytest.approx(median, abs=0.1)  # links are added to the catalogue now and then


# --- entry points ------------------------------------------------------------------------------------------------


def known_cluster(num_ranks: int = 1) -> ClusterSpec:
    return ClusterSpec.parse(f"{num_ranks}xH100")


def no_argument() -> ClusterSpec:
    return known_cluster()


def no_cluster() -> str:
    return "H100"


def entry_point(function: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name="mine", value=f"{__name__}:{function}", group=module.ENTRY_POINTS)


def test_local_is_an_entry_point_and_takes_ranks(monkeypatch):
    monkeypatch.setattr("meshwright.profilers.local.measure_local", known_cluster)
    assert ClusterSpec.parse("local") == known_cluster()
    assert ClusterSpec.parse("local:4") == known_cluster(4)


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        ("missing", None, "cannot be loaded"),
        ("no_cluster", None, "returned a str"),
        ("no_argument", "4", "takes no number"),
    ],
)
def test_broken_entry_point_is_a_config_error(monkeypatch, function, argument, expected):
    monkeypatch.setattr(module.metadata, "entry_points", lambda group: metadata.EntryPoints([entry_point(function)]))
    with pytest.raises(ConfigError, match=expected):
        ClusterSpec.parse("mine" if argument is None else f"mine:{argument}")


# --- laws --------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["x", "8", "0", "-3", "1e9", "99999999999", "H100", "h100-sxm-80gb", "/", "ib400", "nvlink4", ":", ".toml", "local"]
)
TOML_VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(lambda value: str(value)),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(
        ['"H100"', '"ib400"', '""', "[]", "[[1]]", "{}", "2026-01-01", "{ p2p = 1 }", "9" * 500, '{ name = "x" }']
    ),
)
KEYS = st.sampled_from(
    ["name", "reserved_gib", "reserved_bytes", "bandwidth_matrix", "groups", "levels", "device", "num_nodes", "domain_size",
     "devices_per_node", "host_memory_gib", "host_link_bytes_per_s", "storage_bytes_per_s", "link", "[[groups]]",
     "[[levels]]", "[levels]"]
)  # fmt: skip


@pytest.fixture
def no_measuring(monkeypatch):
    def refuse(*_):
        raise ConfigError("not in this test")

    monkeypatch.setattr(module, "_from_entry_point", refuse)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(), st.lists(WORDS, max_size=7).map("".join)))
def test_any_text_is_a_cluster_or_a_config_error(no_measuring, text):
    try:
        cluster = ClusterSpec.parse(text)
    except ConfigError:
        return
    assert cluster.levels[-1].domain_size == cluster.num_devices


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.tuples(KEYS, TOML_VALUES), max_size=8), start=st.sampled_from(["", LAB, OWN_DEVICE]))
def test_any_file_is_a_cluster_or_a_config_error(tmp_path, lines, start):
    body = "\n".join(key if key.startswith("[") else f"{key} = {value}" for key, value in lines)
    try:
        cluster = parse_file(tmp_path, start + body)
    except ConfigError:
        return
    assert cluster.levels[-1].domain_size == cluster.num_devices


def test_reserved_memory_follows_the_channels_of_the_innermost_link() -> None:
    alone, over_pcie, over_nvlink = (
        ClusterSpec.parse(text).reserved_bytes / GIB for text in ("1xL4-24GB", "8xL4-24GB", "8xH100-SXM-80GB")
    )
    assert alone == 0.5
    assert alone < over_pcie < 0.8
    assert 2.4 < over_nvlink < 2.6
