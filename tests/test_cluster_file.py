"""Cluster files: the examples by hand, TOML against JSON, the message of every wrong field, and mutated documents."""

import copy
import dataclasses
import doctest
import json
import re
import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnpiper import cluster_file, cluster_schema
from nnpiper import problem as problems
from nnpiper.cluster import DEVICES, LINKS, MAX_DEVICES, Cluster, problem
from nnpiper.cluster_file import build, load
from nnpiper.paths import DATA
from nnpiper.problem import InputError
from nnpiper.profiles import KindTimes, Profile
from nnpiper.workload import MODELS, chain

EXAMPLES = sorted((DATA / "clusters").glob("*.toml"))
WORK = chain("gpt2")
INF = np.inf


def blocks(*rows):
    """A matrix from blocks of equal numbers: rows of (value, columns), each row of blocks with its height."""
    return np.block([[np.full((height, width), value) for value, width in row] for height, row in rows])


def apart_from_self(matrix):
    return matrix[~np.eye(len(matrix), dtype=bool)]


def check_links(cluster, gigabytes_per_s, microseconds):
    np.testing.assert_allclose(apart_from_self(cluster.bandwidth_bytes_per_s), apart_from_self(gigabytes_per_s) * 1e9)
    np.testing.assert_allclose(apart_from_self(cluster.latency_s), apart_from_self(microseconds) * 1e-6)


def same(a, b):
    arrays = ("flops_per_s", "memory_bytes", "bandwidth_bytes_per_s", "latency_s", "node")
    texts = ("device_names", "labels", "titles", "node_names", "measured")
    return (all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
            and all(getattr(a, name) == getattr(b, name) for name in texts))


# The examples


def test_lab():
    cluster = load(DATA / "clusters" / "lab.toml")
    assert [cluster.title(k) for k in range(4)] == ["gpu0 (RTX 3090)", "gpu1 (RTX 3090)", "gpu2 (RTX 2080 Ti)",
                                                    "gpu3 (RTX 2080 Ti)"]
    assert cluster.node_names == ("ada", "bob") and cluster.node.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(cluster.flops_per_s, [0.4 * 71e12] * 2 + [0.4 * 53.8e12] * 2)
    np.testing.assert_allclose(cluster.memory_bytes, [21.6e9] * 2 + [9.9e9] * 2)
    check_links(cluster, blocks((2, [(0.8 * 31, 2), (1, 2)]), (2, [(1, 2), (0.8 * 15.75, 2)])),
                blocks((2, [(14.1, 2), (50, 2)]), (2, [(50, 2), (14.1, 2)])))


def test_cloud():
    cluster = load(DATA / "clusters" / "cloud.toml")
    np.testing.assert_allclose(cluster.flops_per_s, [0.58 * 312e12] * 4 + [0.3 * 125e12] * 4)
    np.testing.assert_allclose(cluster.memory_bytes, [36e9] * 4 + [14.4e9] * 4)
    check_links(cluster, blocks((4, [(240, 4), (2.5, 4)]), (4, [(2.5, 4), (20, 4)])),
                blocks((4, [(11.8, 4), (50, 4)]), (4, [(50, 4), (11.8, 4)])))
    by_hand = Cluster.from_nodes([("a100-40", 4), ("v100-16", 4)], "25gbe")
    assert same(cluster, dataclasses.replace(by_hand, node_names=("a100-node", "v100-node")))


def test_wan():
    cluster = load(DATA / "clusters" / "wan.toml")
    assert cluster.node_names == ("virginia", "oregon", "california", "ohio")
    np.testing.assert_allclose(cluster.flops_per_s, np.repeat([0.58 * 312, 0.3 * 125, 0.4 * 125, 0.4 * 65], 2) * 1e12)
    np.testing.assert_allclose(cluster.memory_bytes, np.repeat([36, 14.4, 21.6, 14.4], 2) * 1e9)
    gigabits = np.array([[1920, 1.15, 1.05, 1.12], [1.15, 160, 1.25, 1.10], [1.05, 1.25, 0.8 * 248, 1.02],
                         [1.12, 1.10, 1.02, 0.8 * 126]])
    milliseconds = np.array([[0.0118, 67, 59, 11], [67, 0.0118, 12, 49], [59, 12, 0.0141, 52], [11, 49, 52, 0.0141]])
    check_links(cluster, np.kron(gigabits / 8, np.ones((2, 2))), np.kron(milliseconds * 1e3, np.ones((2, 2))))


def test_dgx():
    cluster = load(DATA / "clusters" / "dgx.toml")
    assert cluster.titles == ("A100 SXM4 80 GB",) * 8 and cluster.node_names == ("node0",)
    np.testing.assert_allclose(cluster.flops_per_s, [187.2e12] * 8)
    np.testing.assert_allclose(cluster.memory_bytes, [72e9] * 8)
    check_links(cluster, np.full((8, 8), 240.0), np.full((8, 8), 11.8))


def test_mixed():
    cluster = load(DATA / "clusters" / "mixed.toml")
    assert cluster.labels == ("gpu0", "gpu1", "display", "gpu3", "gpu4", "gpu5", "gpu6", "own")
    assert cluster.titles == ("RTX 4090", "RTX 4090", "RTX 3090", "RTX 3090", "P100 PCIe", "P100 PCIe", "RTX 2080 Ti",
                              "my accelerator")
    assert cluster.index_in_node == (0, 1, 2, 3, 0, 1, 2, 3)
    np.testing.assert_allclose(cluster.flops_per_s / 1e12,
                               [0.4 * 165.2] * 2 + [28.4] * 2 + [0.4 * 18.7] * 2 + [0.4 * 53.8, 45])
    np.testing.assert_allclose(cluster.memory_bytes, [21.6e9, 21.6e9, 19.8e9, 21.6e9, 14.4e9, 14.4e9, 9.9e9, 28.8e9])
    rate = blocks((4, [(12.6, 4), (1, 4)]), (4, [(0.5, 4), (12.6, 4)]))
    latency = blocks((4, [(14.1, 4), (50, 4)]), (4, [(50, 4), (14.1, 4)]))
    rate[2, 3] = rate[3, 2] = 49.8
    latency[2, 3] = latency[3, 2] = 11.8
    rate[7, 4:] = rate[4:, 7] = 3.15
    check_links(cluster, rate, latency)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_toml_and_json_say_the_same(path, tmp_path):
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    other = tmp_path / "cluster.json"
    other.write_text("\ufeff" + json.dumps(document), encoding="utf-8")  # with a byte order mark
    assert same(load(path), load(other))
    assert problem(WORK, load(other), 4, 8).devices == load(path).devices


# Devices


def one(**entry):
    return build({"devices": [entry]})


@pytest.mark.parametrize("text, name", [
    ("rtx3090", "rtx3090"), ("RTX 3090", "rtx3090"), ("NVIDIA GeForce RTX 3090", "rtx3090"), ("3090", "rtx3090"),
    ("rtx_2080-Ti", "rtx2080ti"), ("A100-80", "a100-80"), ("A100 80GB", "a100-80"), ("a100-sxm4-40gb", "a100-40"),
    ("Tesla V100-SXM2-32GB", "v100-32"), ("H100", "h100"), ("H100 PCIe", "h100-pcie"), ("Tesla T4", "t4"),
    ("L4", "l4"), ("L40S", "l40s"),
])
def test_spellings_of_devices(text, name):
    assert one(device=text).device_names == (name,)


@pytest.mark.parametrize("text, name", [
    ("PCIe 3.0", "pcie3"), ("pcie-4", "pcie4"), ("PCIe 5.0 x16", "pcie5"), ("25 GbE", "25gbe"), ("NVLink 3", "nvlink3"),
    ("InfiniBand HDR 200 Gbit/s", "hdr200"), ("NDR400", "ndr400"),
])
def test_spellings_of_links(text, name):
    cluster = build({"devices": [{"device": "t4", "count": 2}], "links": {"inside": text}})
    assert cluster.bandwidth_bytes_per_s[0, 1] == LINKS[name].bytes_per_s
    assert cluster.latency_s[0, 1] == LINKS[name].latency_s


@pytest.mark.parametrize("text", ["A100", "V100", "A10G", "RTX A4000", "A100 80GB PCIe", "GTX 3090", "RTX 4080", "x"])
def test_other_devices_are_not_taken_for_these(text):
    with pytest.raises(InputError, match=re.escape(f"devices.0.device: {text!r}")):
        one(device=text)


def test_catalogue_names_are_told_apart():
    for table, name_of in ((DEVICES, cluster_schema.device_name), (LINKS, cluster_schema.link_name)):
        for name, entry in table.items():
            assert name_of(name) == name_of(name.upper()) == name_of(entry.title) == name


@pytest.mark.parametrize("entry, teraflops, gigabytes", [
    ({"device": "t4", "efficiency": 0.5}, 32.5, 16), ({"device": "t4", "peak_TFLOPS": 100}, 40, 16),
    ({"device": "t4", "achieved_TFLOPS": 12}, 12, 16), ({"device": "t4", "memory_GB": 15}, 26, 15),
    ({"device": "mine", "achieved_TFLOPS": 12, "memory_GB": 7}, 12, 7),
    ({"device": "mine", "peak_TFLOPS": 12, "efficiency": 0.25, "memory_GB": 7.5}, 3, 7.5),
    ({"achieved_TFLOPS": 12, "memory_GB": 7}, 12, 7),
])
@pytest.mark.parametrize("reserve", [None, 0, 0.25])
def test_own_figures(entry, teraflops, gigabytes, reserve):
    document = {"devices": [entry]} | ({} if reserve is None else {"reserve": reserve})
    cluster = build(document)
    kept = 0.9 if reserve is None else 1 - reserve
    assert cluster.flops_per_s[0] == pytest.approx(teraflops * 1e12)
    assert cluster.memory_bytes[0] == pytest.approx(gigabytes * 1e9 * kept)
    assert cluster.titles[0] == {"t4": "T4", "mine": "mine", None: "12 TFLOP/s, 7 GB"}[entry.get("device")]


def test_nodes_need_not_be_neighbours():
    cluster = build({"devices": [
        {"device": "t4", "node": "b", "count": 2}, {"device": "t4", "node": "a", "name": "x", "count": 2},
        {"device": "t4", "node": "b", "name": "last"}], "links": {"between": "100gbe"}})
    assert cluster.node.tolist() == [0, 0, 1, 1, 0] and cluster.node_names == ("b", "a")
    assert cluster.index_in_node == (0, 1, 0, 1, 2)
    assert cluster.labels == ("gpu0", "gpu1", "x-0", "x-1", "last")
    assert cluster.bandwidth_bytes_per_s[0, 4] == 12.6e9 and cluster.bandwidth_bytes_per_s[0, 2] == 10e9


@pytest.fixture
def profile(tmp_path):
    times = {kind: KindTimes(1e-3, 2e-3, 0.0, 0.0) for kind in ("embedding", "block", "head")}
    profile = Profile("My GPU", 20e9, MODELS["gpt2"], 1, 1024, False, "float16", times, 9, "cpu", "2.9", "2026-01-01")
    (tmp_path / "my_gpu.json").write_text(profile.to_json())
    return profile


def test_profiles_are_found_beside_the_file(tmp_path, profile):
    path = tmp_path / "cluster.toml"
    path.write_text('[[devices]]\nprofile = "my_gpu.json"\n[[devices]]\ndevice = "t4"\nmemory_GB = 9\n'
                    'profile = "my_gpu.json"\ncount = 2\n[links]\ninside = "pcie3"\n')
    cluster = load(path)
    assert cluster.measured == (profile,) * 3 and cluster.titles == ("My GPU", "T4", "T4")
    np.testing.assert_allclose(cluster.memory_bytes, [18e9, 8.1e9, 8.1e9])
    # 14 layers at 3 ms
    np.testing.assert_allclose(cluster.flops_per_s, (WORK.forward_flops + WORK.backward_flops).sum() / 42e-3)
    np.testing.assert_allclose(problem(WORK, cluster, 2, 4).backward_s, 2e-3)


@pytest.mark.parametrize("change, words", [
    (None, ["devices.0.profile:", "gone.json: cannot be read"]),
    ({"runs": 0}, ["devices.0.profile:", "runs: 0"]),
    ({"kinds": {"block": {"forward_s": 1, "backward_s": 1, "forward_spread_s": 0, "backward_spread_s": 0}}},
     ["devices.0.profile:", "'embedding'"]),
    ({"kinds": {kind: {"forward_s": 0, "backward_s": 0, "forward_spread_s": 0, "backward_spread_s": 0}
                for kind in ("embedding", "block", "head")}}, ["devices.0.profile:", "in 0 s", "allowed"]),
    ({"memory_bytes": None}, ["devices.0.device: missing, and no memory_GB given"]),
])
def test_bad_profiles(tmp_path, profile, change, words):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"devices": [{"profile": "gone.json" if change is None else "my_gpu.json"}]}))
    if change:
        (tmp_path / "my_gpu.json").write_text(json.dumps(json.loads(profile.to_json()) | change))
    refused(lambda: load(path), path, words)


# Links


def linked(**links):
    """Three T4 in node a, one V100 in node b."""
    return build({"devices": [{"device": "t4", "count": 3, "node": "a"}, {"device": "v100-32", "node": "b"}],
                  "links": {"between": {"GB/s": 1, "us": 1}} | links})


def pair(a, b, gigabytes_per_s, **more):
    return {"ends": [a, b], "link": {"GB/s": gigabytes_per_s, "us": 5}} | more


@pytest.mark.parametrize("turn", [1, -1])
def test_the_nearer_pair_counts(turn):
    cluster = linked(pairs=[pair("a", "b", 2), pair("gpu0", "b", 3), pair("gpu3", "gpu0", 4, one_way=True),
                            pair("a", "a", 6), pair("gpu1", "gpu2", 7)][::turn])
    np.testing.assert_allclose(cluster.bandwidth_bytes_per_s / 1e9,
                               [[INF, 6, 6, 3], [6, INF, 7, 2], [6, 7, INF, 2], [4, 2, 2, INF]])
    np.testing.assert_allclose(apart_from_self(cluster.latency_s), 5e-6)


def test_one_device_nodes_may_share_its_name():
    cluster = build({"devices": [{"device": "t4", "node": "left", "name": "left"}, {"device": "t4", "node": "right"}],
                     "links": {"pairs": [pair("left", "right", 3)]}})
    np.testing.assert_allclose(apart_from_self(cluster.bandwidth_bytes_per_s), 3e9)


def test_both_directions_may_be_named():
    cluster = linked(pairs=[pair("a", "b", 2, one_way=True), pair("b", "a", 3, one_way=True),
                            pair("gpu0", "a", 8, one_way=True), pair("a", "gpu0", 9, one_way=True)])
    np.testing.assert_allclose(cluster.bandwidth_bytes_per_s / 1e9,
                               [[INF, 8, 8, 2], [9, INF, 12.6, 2], [9, 12.6, INF, 2], [3, 3, 3, INF]])


def test_units():
    bits, whole = linked(between={"Gb/s": 20, "us": 7}), linked(between={"GB/s": 2.5, "us": 7})
    assert same(bits, whole)
    assert whole.bandwidth_bytes_per_s[0, 3] == 2.5e9  # no factor on own figures, 80 % of a class
    assert linked(between="25gbe").bandwidth_bytes_per_s[0, 3] == pytest.approx(0.8 * 25e9 / 8)


@pytest.mark.parametrize("unit, scale", [("GB/s", 1e9), ("Gb/s", 0.125e9)])
def test_full_matrix(unit, scale):
    rate, delay = [[0, 2, 3], [4, INF, 5], [6, 7, -1]], [[9, 1, 2], [3, 0, 4], [5, 6, 0]]
    cluster = build({"devices": [{"device": "t4", "node": "a"}, {"device": "v100-16", "node": "b", "count": 2}],
                     "links": {"matrix": {unit: rate, "us": delay}}})
    np.testing.assert_array_equal(apart_from_self(cluster.bandwidth_bytes_per_s), np.arange(2, 8) * scale)
    np.testing.assert_allclose(apart_from_self(cluster.latency_s), np.arange(1, 7) * 1e-6)


def test_unequal_devices_of_a_node_meet_on_the_slower_pcie():
    cluster = build({"devices": [{"device": "rtx3090"}, {"device": "t4"}, {"device": "h100-pcie", "count": 2}]})
    expected = np.array([[0, 15.75, 31, 31], [15.75, 0, 15.75, 15.75], [31, 15.75, 0, 63], [31, 15.75, 63, 0]])
    check_links(cluster, 0.8 * expected, np.full((4, 4), 14.1))


def test_the_most_devices():
    cluster = build({"devices": [{"device": "t4", "count": MAX_DEVICES}]})
    assert cluster.devices == MAX_DEVICES and problem(WORK, cluster, 2, 2).devices == MAX_DEVICES


# Messages


def refused(call, path, words):
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and text.isprintable()  # so that it is one line
    for word in words:
        assert word in text, text
    return text


T4 = {"device": "t4"}
TWO = [{"device": "t4", "node": "a"}, {"device": "t4", "node": "b"}]
LINK = {"GB/s": 1, "us": 1}
MATRIX = {"GB/s": [[0, 1], [1, 0]], "us": [[0, 1], [1, 0]]}


def device(**fields):
    return {"devices": [T4, T4, fields]}


def links(**fields):
    return {"devices": TWO, "links": {"between": LINK} | fields}


def pairs(*entries):
    return links(pairs=list(entries))


def matrix(**fields):
    return {"devices": TWO, "links": {"matrix": MATRIX | fields}}


@pytest.mark.parametrize("document, words", [
    # the file
    ([], ["the file: []: not a table; allowed: a table of devices, links, reserve"]),
    ({}, ["devices: missing; allowed: a list of tables of device, count, node"]),
    ({"devices": []}, ["devices: []", "at least 1"]), ({"devices": {}}, ["devices: {}", "list"]),
    ({"devices": [3]}, ["devices.0: 3: not a table; allowed: a list of tables of device,"]),
    ({"devices": [T4], "reserve": 10}, ["reserve: 10", "a fraction from 0 to below 1"]),
    ({"devices": [T4], "reserve": -0.1}, ["reserve: -0.1"]), ({"devices": [T4], "reserve": True}, ["reserve: True"]),
    ({"devices": [T4], "reserve": float("nan")}, ["reserve: nan", "finite"]),
    ({"devices": [T4], "reserves": 0.1}, ["reserves: unknown key (did you mean 'reserve'?); allowed: devices, links"]),
    ({"devices": [T4], "\n": 0.1}, ["'\\n': unknown key"]),
    ({"devices": [{"device": "t4", "count": 1000}, {"device": "t4", "count": 25}]},
     ["devices: 1025 devices; allowed: 1 to 1024"]),
    # devices
    (device(), ["devices.2.device: missing, and no speed and no memory_GB given; allowed: one of p100,"]),
    (device(device="RTX 309O"), ["devices.2.device: 'RTX 309O' (did you mean 'rtx3090'?): not in the catalogue"]),
    (device(device="A100"), ["(did you mean 'a100-40' or 'a100-80'?)", "any name with memory_GB and achieved_TFLOPS"]),
    (device(device="x", memory_GB=3), ["'x'", "no speed given"]),
    (device(device="x", achieved_TFLOPS=3), ["'x'", "no memory_GB given"]),
    (device(device=" t4"), ["devices.2.device: ' t4'", "no space at the ends"]),
    (device(device="a\tb"), ["'a\\tb'", "printable"]), (device(device=""), ["devices.2.device: ''"]),
    (device(device=3), ["devices.2.device: 3", "string"]), (device(device=None), ["devices.2.device: None"]),
    (device(device="t4", memory_GB=-3),
     ["devices.2.memory_GB: -3: ", "; allowed: GB (10^9 bytes) from 0.001 to 1e+06"]),
    (device(device="t4", memory_GB=0), ["devices.2.memory_GB: 0: "]),
    (device(device="t4", memory_GB="24"), ["devices.2.memory_GB: '24'", "number"]),
    (device(device="t4", memory_GB=1e300), ["devices.2.memory_GB: 1e+300"]),
    (device(device="t4", memory_GB=10**400), ["devices.2.memory_GB: 1000"]),
    (device(device="t4", memory_gb=24),
     ["devices.2.memory_gb: unknown key (did you mean 'memory_GB'?); allowed: device"]),
    (device(device="t4", memory=24), ["did you mean 'memory_GB'?"]), (device(gpu="t4"), ["devices.2.gpu: unknown key"]),
    (device(device="t4", count=0), ["devices.2.count: 0", "an integer from 1 to 1024"]),
    (device(device="t4", count=True), ["devices.2.count: True"]), (device(device="t4", count=2.0), ["count: 2.0"]),
    (device(device="t4", achieved_TFLOPS=0), ["devices.2.achieved_TFLOPS: 0", "TFLOP/s from 1e-06 to 1e+06"]),
    (device(device="t4", achieved_TFLOPS=INF), ["devices.2.achieved_TFLOPS: inf", "finite"]),
    (device(device="t4", achieved_TFLOPS=5, efficiency=0.4), ["devices.2.achieved_TFLOPS: 5: beside peak_TFLOPS"]),
    (device(device="t4", efficiency=40), ["devices.2.efficiency: 40", "a fraction from 0.001 to 1"]),
    (device(device="x", memory_GB=3, peak_TFLOPS=9), ["devices.2.efficiency: missing", "go together"]),
    (device(device="x", memory_GB=3, efficiency=0.5), ["devices.2.peak_TFLOPS: missing"]),
    (device(device="t4", name="gpu0"), ["devices.2.name: 'gpu0': devices.0 is called so", "unique"]),
    ({"devices": [{"device": "t4", "name": "gpu1"}, T4]}, ["devices.1.name: 'gpu1': devices.0 is called so"]),
    (device(device="t4", name="7"), ["devices.2.name: '7'", "not digits alone"]),
    (device(device="t4", name="a b"), ["devices.2.name: 'a b'"]), (device(device="t4", name="[b]"), ["name: '[b]'"]),
    (device(device="t4", name="x" * 61), ["devices.2.name: 'xxx", "...", "1 to 60 letters"]),
    (device(device="t4", node=""), ["devices.2.node: ''"]), (device(device="t4", node=1), ["devices.2.node: 1"]),
    (device(device="t4", node="b"), ["devices.0.node: missing"]),
    (device(device="t4", profile=""), ["devices.2.profile: ''", "path"]),
    (device(device="t4", profile="gone.json", count=2), ["devices.2.profile: ", "gone.json: cannot be read"]),
    (device(device="t4", profile="a\0b"), ["devices.2.profile: "]),
    # a link
    (links(between=25), ["links.between: 25: a bandwidth without its unit", "bytes or in bits", "GB/s", "Gb/s", "us"]),
    (links(between={"bandwidth": 25, "us": 3}), ["links.between.bandwidth: unknown key: a bandwidth without its unit"]),
    (links(between={"Gbps": 25, "us": 3}), ["links.between.Gbps: unknown key: a bandwidth without its unit"]),
    (links(between={"gb/s": 25, "us": 3}), ["links.between.gb/s: unknown key: a bandwidth without its unit"]),
    (links(between={"GB/s": 25, "ms": 3}),
     ["links.between.ms: unknown key (did you mean 'us'?); allowed: \"GB/s\"", "us (latency"]),
    (links(between={"GB/s": 25}), ["links.between.us: missing; allowed: microseconds from 0 to 1e+09"]),
    (links(between={"us": 25}), ["links.between: {'us': 25}: no bandwidth; allowed: one of 10gbe"]),
    (links(between={"us": 25, "GB/s": 1, "Gb/s": 8}), ["links.between: {'us'", "GB/s and Gb/s at once"]),
    (links(between="10gb"), ["links.between: '10gb': no link class", "(did you mean '10gbe'?); allowed: one of 10gbe"]),
    (links(between=[1]), ["links.between: [1]: not a table"]), (links(between=True), ["links.between: True"]),
    *((links(inside={"GB/s": value, "us": 1}), [f"links.inside.GB/s: {value}: ", "10^9 bytes a second from 1e-06 to"])
      for value in (0, -1, INF, float("nan"), 1e300, 1e-9)),
    *((links(inside={"Gb/s": 1, "us": value}), [f"links.inside.us: {value}: ", "microseconds from 0"])
      for value in (-1, INF, float("nan"), 1e10)),
    (links(outside="10gbe"), ["links.outside: unknown key (did you mean 'inside'?); allowed: inside, between, pairs"]),
    ({"devices": TWO, "links": 3}, ["links: 3: not a table; allowed: a table of inside, between, pairs, matrix"]),
    ({"devices": TWO}, ["links.between: missing: no link is known from a to b", "links.pairs"]),
    ({"devices": [T4, {"device": "v100-16"}]}, ["links.inside: missing: no link is known from gpu0 (t4) to gpu1"]),
    ({"devices": [{"device": "mine", "achieved_TFLOPS": 1, "memory_GB": 1, "count": 2}]},
     ["links.inside: missing: no link is known from gpu0 (mine) to gpu1 (mine)"]),
    # pairs
    (links(pairs=3), ["links.pairs: 3"]), (pairs(3), ["links.pairs.0: 3: not a table"]),
    (pairs({"link": LINK}), ["links.pairs.0.ends: missing; allowed: two names"]),
    (pairs({"ends": ["a", "b"]}), ["links.pairs.0.link: missing; allowed: one of 10gbe"]),
    (pairs({"ends": ["a"], "link": LINK}), ["links.pairs.0.ends: ['a']"]),
    (pairs({"ends": ["a", 1], "link": LINK}), ["links.pairs.0.ends.1: 1"]),
    (pairs({"ends": ["a", "b"], "link": LINK, "one_way": 1}), ["links.pairs.0.one_way: 1", "true or false"]),
    (pairs({"ends": ["a", "b"], "link": LINK, "oneway": True}), ["did you mean 'one_way'?"]),
    (pairs({"ends": ["a", "b"], "link": {"GB/s": 0, "us": 0}}), ["links.pairs.0.link.GB/s: 0"]),
    (pairs(pair("a", "gpu0", 1), pair("a", "c", 1)), ["links.pairs.0.ends: ['a', 'gpu0']: one device"]),
    (pairs(pair("a", "b", 1), pair("a", "gpu9", 1)),
     ["links.pairs.1.ends: 'gpu9': no node or device (did you mean 'gpu", "allowed: a, b, gpu0, gpu1"]),
    (pairs(pair("gpu1", "gpu1", 1)), ["links.pairs.0.ends: ['gpu1', 'gpu1']: one device"]),
    (pairs(pair("a", "b", 1), pair("b", "a", 2)), ["links.pairs.1.ends: ['b', 'a']: another pair", "one_way"]),
    (pairs(pair("gpu0", "b", 1), pair("a", "gpu1", 2)), ["links.pairs.1.ends: ['a', 'gpu1']: another pair"]),
    ({"devices": TWO, "links": {"pairs": [pair("a", "b", 1, one_way=True)]}},
     ["links.between: missing: no link is known from b to a"]),
    ({"devices": [{"device": "t4", "node": "a"}, {"device": "t4", "node": "b", "name": "a"}],
      "links": {"pairs": [pair("a", "b", 1)]}}, ["links.pairs.0.ends: 'a': the name of a node and of a device"]),
    # a full matrix
    (links(matrix=MATRIX), ["links.matrix: given beside between"]),
    (matrix(us=[[0, 1]]), ["links.matrix.us: 1 rows; allowed: 2 rows of 2 numbers"]),
    (matrix(us=[[0, 1], [1]]), ["links.matrix.us: row 1 has 1 numbers"]), (matrix(us=3), ["links.matrix.us: 3"]),
    (matrix(us=[[0, "x"], [1, 0]]), ["links.matrix.us.0.1: 'x'"]), (matrix(us=[3, 4]), ["links.matrix.us.0: 3"]),
    (matrix(**{"Gb/s": [[0, 1], [1, 0]]}), ["links.matrix: ", "GB/s and Gb/s at once"]),
    (matrix(rates=[[0]]), ["links.matrix.rates: unknown key: a bandwidth without its unit"]),
    *((matrix(**{"GB/s": [[0, 1], [value, 0]]}), ["links.matrix.GB/s.1.0: ", "allowed: 1e-06 to 1e+06"])
      for value in (0, -1, INF, float("nan"))),
    (matrix(us=[[0, -1], [0, 0]]), ["links.matrix.us.0.1: -1; allowed: 0 to 1e+09"]),
])
def test_wrong_fields(tmp_path, document, words):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    refused(lambda: load(path), path, words)


@pytest.mark.parametrize("name, content, words", [
    ("c.toml", b"[[devices]\n", ["cannot be read", "line 1", "TOML"]),
    ("c.toml", b'[links]\nbetween = { GB/s = 3, us = 4 }\n', ["line 2", 'units as quoted keys, "GB/s" = 12.5']),
    ("c.toml", b'reserve = 0.1\nreserve = 0.2\n', ["cannot be read"]),
    ("c.toml", b"devices = " + b"[" * 100_000, ["nested too deep"]),
    ("c.toml", b"reserve = " + b"9" * 5000, ["cannot be read"]),
    ("c.toml", b"[[devices]]\ndevice = 't4'\nmemory_GB = 0x" + b"f" * 5000, ["a number of thousands of digits"]),
    ("c.toml", b"[[devices]]\ndevice = 1979-05-27\n", ["devices.0.device: datetime.date(1979, 5, 27)"]),
    ("c.toml", b"", ["devices: missing"]), ("c.json", b"", ["cannot be read", "JSON"]),
    ("c.json", b'{"devices": [{"device": "t4"}', ["cannot be read", "JSON"]),
    ("c.json", b"[" * 100_000, ["nested too deep"]),
    ("c.json", b'{"devices": [{"device": "t4", "device": "l4"}]}', ["key 'device' twice in one table"]),
    ("c.json", b'{"devices": [{"device": "\\ud800"}]}', ["devices.0.device"]),
    ("c.json", b'{"devices": [{"device": "t4"}], "\\ud800": 1}', ["the file: "]),
    ("c.json", b"\xff\xfe{}", ["cannot be read", "UTF-8"]), ("c.toml", bytes(range(256)), ["cannot be read", "UTF-8"]),
    ("c.yaml", b"devices: []", ["*.toml or *.json"]), ("cluster", b"{}", ["*.toml or *.json"]),
])
def test_files_that_are_none(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    refused(lambda: load(path), path, words)


def test_paths_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "d.toml").mkdir()
    refused(lambda: load(tmp_path / "d.toml"), tmp_path / "d.toml", ["cannot be read", "directory"])
    refused(lambda: load(tmp_path / "gone.json"), tmp_path / "gone.json", ["cannot be read", "No such file"])
    with pytest.raises(InputError, match="cannot be read"):
        load("a\0b.toml")
    monkeypatch.setattr(problems, "MAX_FILE_BYTES", 10)
    (tmp_path / "c.toml").write_bytes(b"#" * 11)
    refused(lambda: load(tmp_path / "c.toml"), tmp_path / "c.toml", ["cannot be read: larger than 10 bytes"])


# Mutated documents

RICH = {
    "reserve": 0.2,
    "devices": [{"device": "rtx3090", "count": 2, "node": "a", "name": "big"}, {"device": "t4", "node": "b"},
                {"device": "x", "peak_TFLOPS": 9, "efficiency": 0.5, "memory_GB": 3, "node": "a"},
                {"device": "y", "achieved_TFLOPS": 9, "memory_GB": 3, "node": "b", "name": "last"}],
    "links": {"inside": "pcie3", "between": {"Gb/s": 3, "us": 4}, "pairs": [
        {"ends": ["a", "b"], "link": {"GB/s": 3, "us": 9}, "one_way": True},
        {"ends": ["big-0", "b"], "link": "25gbe"}]},
}
FULL = {"devices": [{"device": "t4", "count": 2}], "links": {"matrix": MATRIX}}
DOCUMENTS = [RICH, FULL] + [tomllib.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES]
NUMBER = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1e300, 1e-300, 10**400, INF, 5e-324, True]))
WORD = st.one_of(st.text(max_size=8), st.sampled_from(["a", "b", "t4", "gpu0", "10gbe", "node0", "\ud800", "x" * 99]))
VALUE = st.recursive(st.one_of(NUMBER, WORD, st.none()), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(WORD | st.sampled_from(["GB/s", "us", "ends"]), inner, max_size=3)),
    max_leaves=4)


def places(document):
    """Every (table or list, key or index) of a document."""
    found, todo = [], [document]
    while todo:
        part = todo.pop()
        for key in part if isinstance(part, dict) else range(len(part)):
            found.append((part, key))
            if isinstance(part[key], (dict, list)):
                todo.append(part[key])
    return found


def outcome(path):
    """True if the file gives a cluster with a problem; False if it is refused as it should be."""
    try:
        cluster = load(path)
    except InputError as error:
        assert str(error).startswith(f"{path}: ") and str(error).isprintable() and len(str(error)) < 2000
        return False
    asked = problem(WORK, cluster, 1, 1)
    assert asked.devices == cluster.devices == len(set(cluster.labels)) == len(cluster.measured)
    assert [cluster.title(k) for k in range(cluster.devices)] and max(cluster.node) == len(cluster.node_names) - 1
    return True


@settings(max_examples=400)
@given(st.data(), st.sampled_from(DOCUMENTS), st.integers(0, 3))
def test_mutated_documents(tmp_path_factory, data, document, changes):
    document = copy.deepcopy(document)
    for _ in range(changes):
        if not document:
            break
        part, key = data.draw(st.sampled_from(places(document)))
        move = data.draw(st.sampled_from(["replace", "replace", "scale", "drop", "add", "repeat", "rename"]))
        if move == "scale" and isinstance(part[key], (int, float)) and abs(part[key]) < 1e100:
            part[key] *= data.draw(st.sampled_from([-1, 0, 0.5, 2, 1e5, 1e-5, 1e200, INF]))
        elif move == "drop":
            del part[key]
        elif move == "add" and isinstance(part, dict):
            part[data.draw(WORD)] = data.draw(VALUE)
        elif move == "repeat" and isinstance(part, list):
            part.append(copy.deepcopy(part[key]))
        elif move == "rename" and isinstance(part, dict):
            part[data.draw(st.sampled_from([key.lower(), key[:-1], key + "s"]))] = part.pop(key)
        else:
            part[key] = data.draw(VALUE)
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(document))
    taken = outcome(path)
    assert taken or changes  # unchanged, all of them are taken


@settings(max_examples=200)
@given(st.data(), st.sampled_from(EXAMPLES))
def test_mutated_text(tmp_path_factory, data, example):
    text = example.read_bytes()
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 20)) | st.just(len(text)))
    path = tmp_path_factory.getbasetemp() / "mutated.toml"
    path.write_bytes(text[:at] + data.draw(st.binary(max_size=5)) + text[end:])
    outcome(path)


def test_docstring_examples():
    assert doctest.testmod(cluster_file).attempted and doctest.testmod(cluster_file).failed == 0
    assert doctest.testmod(cluster_schema).attempted and doctest.testmod(cluster_schema).failed == 0
