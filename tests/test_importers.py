"""Importers against totals taken from the raw files by other means: samples beside the repository, and small files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnpiper import cost, importers, measured_profiles, simulator
from nnpiper.measured import MeasuredChain, crossing_bytes, order
from nnpiper.paths import PROFILES
from nnpiper.problem import InputError
from nnpiper.solver import NNPiper

needs_samples = pytest.mark.skipif(not PROFILES.is_dir(), reason="no folder shared/profiles beside the repository")


@pytest.fixture(scope="module")
def solve():
    solver = NNPiper.from_pretrained()

    def check(problem):
        """The solver finds a feasible plan, whose step is as long as the work needs at least."""
        strategy = solver.solve(problem, moves=500)
        strategy.check(problem)
        assert cost.overflow_bytes(problem, strategy) == 0
        step_s = simulator.step_time(problem, strategy)
        # the least that the work takes: all devices busy all the time, each layer on its fastest
        work = (problem.forward_s + problem.backward_s).min(axis=1).sum()
        assert problem.micro_batches * work / problem.devices <= step_s < np.inf
    return check


def crossing_by_hand(chain, edges, size_of):
    """[L] for each cut, the tensors made before it that are read behind it; `size_of` an edge's bytes."""
    out = []
    for cut in range(1, len(chain) + 1):
        before, behind = set(chain[:cut]), set(chain[cut:])
        out.append(sum(max(size_of(a, b) for x, b in edges if x == a and b in behind)
                       for a in before if any(x == a and b in behind for x, b in edges)))
    return out


# Graphs


@st.composite
def graphs(draw):
    L = draw(st.integers(1, 9))
    pairs = [(a, b) for a in range(L) for b in range(a + 1, L)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    names = draw(st.permutations(range(L)))  # listed in any order
    return list(range(L)), {(names[a], names[b]): float(draw(st.integers(0, 9))) for a, b in edges}


@given(graphs())
def test_any_graph_becomes_a_chain(graph):
    ids, edges = graph
    chain = order(ids, edges)
    assert sorted(chain) == ids
    assert all(chain.index(a) < chain.index(b) for a, b in edges)
    np.testing.assert_allclose(crossing_bytes(chain, edges),
                               crossing_by_hand(chain, edges, lambda a, b: edges[a, b]), rtol=1e-12)


def test_inputs_wait_for_their_first_reader():
    # a -> b -> c -> d, and an input x that c alone reads
    chain = order(["x", "a", "b", "c", "d"], {("a", "b"): 1.0, ("b", "c"): 1.0, ("c", "d"): 1.0, ("x", "c"): 5.0})
    assert chain == ["a", "b", "x", "c", "d"]


def test_a_long_chain_and_a_wide_star_are_quick():
    L = 9_999
    chain = order(list(range(L)), {(i, i + 1): 1.0 for i in range(L - 1)})
    assert chain == list(range(L))
    star = {(0, i): float(i) for i in range(1, L)}
    assert crossing_bytes(order(list(range(L)), star), star).tolist() == [float(L - 1)] * (L - 1) + [0.0]


# PipeDream and DAPPLE


@needs_samples
@pytest.mark.parametrize("name", measured_profiles.GRAPHS)
def test_pipedream_totals(name, solve):
    path = PROFILES / name
    text = path.read_text()
    chain = importers.pipedream({"V100": path})
    forward_ms, backward_ms, weights = (sum(map(float, re.findall(rf"{field}=([\d.]+)", text))) for field in (
        "forward_compute_time", "backward_compute_time", "parameter_size"))
    outputs = sum(float(number) for sizes in re.findall(r"activation_size=(\[.*?\]|[\d.]+)", text)
                  for number in re.findall(r"[\d.]+", sizes))
    assert chain.layers == len(re.findall("forward_compute_time", text))
    assert chain.forward_s.sum() == pytest.approx(forward_ms / 1e3, rel=1e-12)
    assert chain.backward_s.sum() == pytest.approx(backward_ms / 1e3, rel=1e-12)
    assert chain.gradient_bytes.sum() == pytest.approx(weights, rel=1e-12)
    assert chain.static_bytes.sum() == pytest.approx(4 * weights, rel=1e-12)
    assert chain.stash_bytes.sum() == pytest.approx(outputs, rel=1e-12)
    placed = [layer.split()[0] for layer in chain.layer_names]
    edges = re.findall(r"^\s*(node\d+) -- (node\d+)\s*$", text, re.M)
    made = dict(zip(placed, chain.stash_bytes))
    assert edges and chain.output_bytes == pytest.approx(crossing_by_hand(placed, edges, lambda a, b: made[a]))
    solve(chain.problem(["V100"] * 4, 16e9, 1.25e9, 50e-6, stages=4, micro_batches=8))


@needs_samples
def test_vgg16_is_a_plain_chain():
    chain = importers.pipedream({"GPU": PROFILES / "pipedream/vgg16.graph.txt"})
    assert [int(name.split()[0][4:]) for name in chain.layer_names] == list(range(1, 42))
    np.testing.assert_array_equal(np.delete(chain.output_bytes, 32)[:-1], np.delete(chain.stash_bytes, 32)[:-1])
    assert chain.output_bytes[32] == 4 + chain.stash_bytes[31]  # a number, size(0), beside the tensor it is of
    # Simonyan and Zisserman 2015: 138 million parameters, of 4 bytes
    assert chain.gradient_bytes.sum() == pytest.approx(4 * 138.36e6, rel=1e-4)


@needs_samples
def test_dapples_bert_24_is_bert_large():
    chain = importers.pipedream({"V100": PROFILES / "dapple/bert-24-pbs-6.txt"})
    blocks = [i for i, name in enumerate(chain.layer_names) if "layer_" in name]
    assert len(blocks) == 24
    # Devlin et al. 2019: blocks of 12 h^2 + 13 h parameters, h = 1024, of 4 bytes
    assert chain.gradient_bytes[blocks] == pytest.approx(4 * (12 * 1024**2 + 13 * 1024))


GRAPH = """\
node1 -- Input -- forward_compute_time=1.0, backward_compute_time=0.5, activation_size=8.0, parameter_size=0.000
node2 -- Linear(in=2, out=2) -- forward_compute_time=2.0, backward_compute_time=4.0, \
activation_size=[4.0; 2.0], parameter_size=16 -- stage_id=0
node3 -- Add -- forward_compute_time=3, backward_compute_time=6, activation_size=1e3, parameter_size=4

\tnode1 -- node2
  node2 -- node3
\tnode1 -- node3
"""


def test_pipedream_by_hand_on_two_types(tmp_path):
    (tmp_path / "a").write_text(GRAPH)
    (tmp_path / "b").write_text("\n".join(reversed(GRAPH.replace("_compute_time=", "_compute_time=2").splitlines())))
    chain = importers.pipedream({"A": tmp_path / "a", "B": tmp_path / "b"})
    assert chain.types == ("A", "B")
    assert chain.layer_names == ("node1 Input", "node2 Linear", "node3 Add")
    assert chain.forward_s == pytest.approx(np.array([[1e-3, 21e-3], [2e-3, 22e-3], [3e-3, 23e-3]]))
    assert chain.backward_s == pytest.approx(np.array([[0.5e-3, 20.5e-3], [4e-3, 24e-3], [6e-3, 26e-3]]))
    assert chain.output_bytes.tolist() == [8, 8 + 6, 0]
    assert chain.stash_bytes.tolist() == [8, 6, 1000]
    assert chain.static_bytes.tolist() == [0, 64, 16]
    assert chain.gradient_bytes.tolist() == [0, 16, 4]


@pytest.mark.parametrize("old, new, message", [
    ("forward_compute_time=2.0", "forward_compute_time=fast", "line 2: forward_compute_time: 'fast'; allowed: a"),
    ("forward_compute_time=2.0", "forward_compute_time=nan", "line 2: forward_compute_time: 'nan'"),
    ("backward_compute_time=4.0", "backward_compute_time=-1", "line 2: backward_compute_time: '-1'"),
    ("activation_size=[4.0; 2.0]", "activation_size=[4.0; x]", "line 2: activation_size: 'x'"),
    ("activation_size=[4.0; 2.0]", "activation_size=[]", "line 2: activation_size: ''"),
    ("parameter_size=4", "parameter_size=1e300", "line 3: parameter_size: '1e300'; allowed: .* to 1e\\+18"),
    ("backward_compute_time=6, ", "", "line 3: .*allowed: node -- name -- forward_compute_time"),
    ("node2 -- node3", "node2 -- node9", "line 6: edge of node 'node9'; allowed: nodes of the file"),
    ("node2 -- node3", "node2 -> node3", "line 6: 'node2 -> node3'"),
    ("node3 -- Add", "node2 -- Add", "line 3: node 'node2' again"),
    ("node2 -- node3", "node3 -- node2\n\tnode2 -- node3", "node 'node2' lies on or behind a cycle"),
    (GRAPH, "", "0 nodes; allowed: 1 to 10000"),
])
def test_pipedream_errors(tmp_path, old, new, message):
    path = tmp_path / "graph.txt"
    assert old in GRAPH
    path.write_text(GRAPH.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        importers.pipedream({"A": path})
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_graphs_of_two_types_must_agree(tmp_path):
    (tmp_path / "a").write_text(GRAPH)
    (tmp_path / "b").write_text(GRAPH.replace("\tnode1 -- node3\n", ""))
    with pytest.raises(InputError, match="b: not the nodes and edges of .*a; allowed: one graph for all types"):
        importers.pipedream({"A": tmp_path / "a", "B": tmp_path / "b"})
    with pytest.raises(InputError, match="files: none"):
        importers.pipedream({})
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="cannot be read: .*; allowed: a UTF-8 text file"):
            importers.pipedream({"A": path})


# Piper


@needs_samples
@pytest.mark.parametrize("variant, forward_share", [("vanilla", 1 / 3), ("activation recomp", 1 / 4)])
def test_piper_totals(variant, forward_share, solve):
    path = PROFILES / "piper/bert32a100.json"
    raw = json.loads(path.read_text())
    alone = {n["id"]: next(t for t in n["TMPCs"]["1"] if t["id"] == variant) for n in raw["nodes"]}
    chain = importers.piper({"A100": path}, variant)
    seconds = sum(entry["timePerSample"] for entry in alone.values())
    assert chain.forward_s.sum() == pytest.approx(forward_share * seconds, rel=1e-12)
    assert (chain.forward_s + chain.backward_s).sum() == pytest.approx(seconds, rel=1e-12)
    for array, field in ((chain.stash_bytes, "memoryUsageA"), (chain.static_bytes, "memoryUsageB"),
                         (chain.gradient_bytes, "parameterSize")):
        assert array.sum() == pytest.approx(sum(entry[field] for entry in alone.values()), rel=1e-12)
    placed = [int(name.split()[0]) for name in chain.layer_names]
    sizes = {(e["sourceId"], e["destId"]): e["communicationCost"] for e in raw["edges"]}
    assert chain.output_bytes == pytest.approx(crossing_by_hand(placed, sizes, lambda a, b: sizes[a, b]))
    types, memory, bandwidth = importers.piper_devices(path, "A100")
    assert (len(types), memory, bandwidth) == (10, 80e9, 25e9)
    solve(chain.problem(types, memory, bandwidth, 0.0, stages=4, micro_batches=16))


PIPER = {"maxDevices": 2, "maxMemoryPerDevice": 1e9, "bandwidth": 1e9, "nodes": [
    {"id": i, "name": "n", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 3.0, "parameterSize": 2.0,
                                            "memoryUsageA": 5.0, "memoryUsageB": 7.0}]}} for i in (4, 2)],
    "edges": [{"sourceId": 4, "destId": 2, "communicationCost": 9.0}]}


def _with(fields, path, value):
    copy = json.loads(json.dumps(fields))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize("path, value, message", [
    (["nodes", 1, "id"], 4, "nodes.1.id: 4 again; allowed: each node once"),
    (["nodes", 0, "TMPCs"], {"2": []}, "nodes.0.TMPCs.1: no entry 'vanilla'; allowed: none"),
    (["nodes", 0, "TMPCs", "1", 0, "id"], "x", "nodes.0.TMPCs.1: no entry 'vanilla'; allowed: x"),
    (["nodes", 0, "TMPCs", "1", 0, "timePerSample"], -3, "nodes.0.TMPCs.1.0.timePerSample: -3"),
    (["nodes", 0, "TMPCs", "1", 0, "memoryUsageA"], float("nan"), "memoryUsageA: NaN"),
    (["nodes"], [], "edge of node 4; allowed: nodes of the file"),
    (["edges", 0, "destId"], 3, "edges.0: edge of node 3"),
    (["edges", 0, "destId"], 4, "node 4 lies on or behind a cycle"),
    (["maxDevices"], 10**9, "maxDevices: 1000000000"),
    (["bandwidth"], 0, "bandwidth: 0"),
])
def test_piper_errors(tmp_path, path, value, message):
    file = tmp_path / "piper.json"
    file.write_text(_with(PIPER, path, value))
    with pytest.raises(InputError, match=message) as caught:
        importers.piper({"A100": file})
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


# Metis, in the format that its README documents


METIS = {"model": {"model_name": "GPT3", "num_layers": 4,
                   "parameters": {"total_parameters_bytes": 300 << 20,
                                  "parameters_per_layer_bytes": [100 << 20, 50 << 20, 50 << 20, 100 << 20]}},
         "execution_time": {"total_time_ms": 80.0, "forward_backward_time_ms": 70.0, "batch_generator_time_ms": 1.0,
                            "layernorm_grads_all_reduce_time_ms": 0.1, "embedding_grads_all_reduce_time_ms": 0.1,
                            "optimizer_time_ms": 9.0, "layer_compute_total_ms": [1.5, 30.0, 30.0, 6.0]},
         "execution_memory": {"total_memory_mb": 2000, "layer_memory_total_mb": [500, 300, 300, 350]}}
CLUSTER = {"10.0.0.1": {"instance_type": "V100", "inter_bandwidth": 312500000.0, "intra_bandwidth": 5312500000.0,
                        "memory": 16},
           "10.0.0.2": {"instance_type": "T4", "inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 15}}


@pytest.fixture
def metis_folder(tmp_path):
    slow = json.loads(json.dumps(METIS))
    slow["execution_time"]["layer_compute_total_ms"] = [3.0, 90.0, 90.0, 18.0]
    slow["execution_memory"]["layer_memory_total_mb"][1] = 310
    (tmp_path / "DeviceType.V100_tp1_bs2.json").write_text(json.dumps(METIS))
    (tmp_path / "DeviceType.T4_tp1_bs2.json").write_text(json.dumps(slow))
    (tmp_path / "DeviceType.V100_tp2_bs2.json").write_text("not read")
    (tmp_path / "DeviceType.V100_tp1_bs4.json").write_text("not read")
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n10.0.0.2 1\n\n10.0.0.1 1\n")
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    return tmp_path


def test_metis_totals(metis_folder, solve):
    chain = importers.metis(metis_folder, 2, output_bytes=1e6)
    assert chain.types == ("T4", "V100") and chain.layers == 4
    both = (chain.forward_s + chain.backward_s).sum(axis=0)
    assert both == pytest.approx([0.201, 0.0675]) and chain.forward_s.sum(axis=0) == pytest.approx(both / 3)
    # with one micro-batch in flight a layer needs what the files say, the larger of the two types
    assert chain.static_bytes + chain.stash_bytes == pytest.approx(np.array([500, 310, 300, 350]) * 2**20)
    assert chain.static_bytes == pytest.approx(np.array([400, 200, 200, 350]) * 2**20)  # 4 x weights, or all there is
    assert chain.gradient_bytes.sum() == 300 * 2**20
    assert chain.output_bytes.tolist() == [1e6, 1e6, 1e6, 0]
    types, memory, bandwidth = importers.metis_devices(metis_folder / "hostfile", metis_folder / "cluster.json")
    assert types == ("V100", "V100", "T4", "V100")
    assert memory.tolist() == [16 * 2**30, 16 * 2**30, 15 * 2**30, 16 * 2**30]
    assert bandwidth[0, 1] == bandwidth[1, 0] == 5312500000.0  # in one node
    assert bandwidth[0, 2] == bandwidth[2, 0] == 312500000.0  # the slower of 0.3125 and 10 GB/s
    assert bandwidth[0, 3] == 312500000.0  # two nodes with one address
    problem = chain.problem(types, memory, bandwidth, 20e-6, stages=3, micro_batches=8)
    assert problem.forward_s[:, 2] == pytest.approx(np.array([1, 30, 30, 6]) * 1e-3)
    assert problem.memory_bytes == pytest.approx(0.9 * memory)
    solve(problem)


def test_metis_reads_activations_where_they_are_stated(metis_folder):
    for path in metis_folder.glob("*_tp1_bs2.json"):
        fields = json.loads(path.read_text())
        fields["model"]["parameters"]["activation_parameters_bytes"] = [7.0, 8.0, 9.0, 10.0]
        path.write_text(json.dumps(fields))
    assert importers.metis(metis_folder, 2).output_bytes.tolist() == [7, 8, 9, 0]


@pytest.mark.parametrize("path, value, message", [
    (["execution_memory", "layer_memory_total_mb"], [1, 2, 3],
     "execution_memory.layer_memory_total_mb: 3 numbers; allowed: 4, one a layer"),  # as in a published sample
    (["execution_time", "layer_compute_total_ms", 1], "x", "execution_time.layer_compute_total_ms.1"),
    (["execution_time", "layer_compute_total_ms", 1], -1, "execution_time.layer_compute_total_ms.1: -1"),
    (["execution_time", "layer_compute_total_ms"], [], "execution_time.layer_compute_total_ms"),
    (["model", "parameters", "parameters_per_layer_bytes"], [], "parameters_per_layer_bytes: 0 numbers; allowed: 4"),
    (["model"], {}, "model.parameters"),
])
def test_metis_errors(metis_folder, path, value, message):
    file = metis_folder / "DeviceType.T4_tp1_bs2.json"
    file.write_text(_with(METIS, path, value))
    with pytest.raises(InputError, match=message) as caught:
        importers.metis(metis_folder, 2, 1e6)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_metis_arguments(metis_folder):
    for arguments, message in (((metis_folder, 3, 1.0), "no DeviceType.X_tp1_bs3.json; allowed for batch_size: 2, 4"),
                               ((metis_folder / "none", 2, 1.0), "cannot be read: .*; allowed: a folder"),
                               (("a\0b", 2, 1.0), "cannot be read"),
                               ((metis_folder, 0, 1.0), "batch_size: 0"),
                               ((metis_folder, 2), "output_bytes: None; allowed: the bytes that a layer sends on"),
                               ((metis_folder, 2, float("nan")), "output_bytes: nan"),
                               ((metis_folder, 2, "1"), "output_bytes: '1'")):
        with pytest.raises(InputError, match=message):
            importers.metis(*arguments)


@pytest.mark.parametrize("text, message", [
    ("", "no lines; allowed: one line a node"),
    ("10.0.0.1", "line 1: '10.0.0.1'; allowed: IP and number of devices"),
    ("10.0.0.1 0", "line 1: '10.0.0.1 0'"),
    ("10.0.0.1 8\n10.0.0.1 1020", "line 2: .*at most 1024 in all"),
    ("10.0.0.1 8\n10.0.0.3 8", "line 2: host: '10.0.0.3' .did you mean '10.0.0.[12]'.*; allowed: 10.0.0.1, 10.0.0.2"),
])
def test_hostfile_errors(metis_folder, text, message):
    path = metis_folder / "hostfile"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        importers.metis_devices(path, metis_folder / "cluster.json")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


# Sailor


@needs_samples
@pytest.mark.parametrize("b", [1, 2])
def test_sailor_totals(b, solve):
    folder, info_file = PROFILES / "sailor", PROFILES / "sailor/llm_info.json"
    files = {path.stem: path for path in sorted((folder / "profiles/OPT-350").glob("*.json"))}
    chain = importers.sailor(files, info_file, "OPT-350", b)
    assert chain.layers == 26 and len(files) == 6
    for t, path in enumerate(files.values()):
        rows = json.loads(path.read_text())[str(b)]["1"].values()
        assert chain.forward_s[:, t].sum() == pytest.approx(sum(row[0] for row in rows), rel=1e-12)
        assert chain.backward_s[:, t].sum() == pytest.approx(sum(row[1] for row in rows), rel=1e-12)
    info = json.loads(info_file.read_text())["OPT-350"]["1"]
    weights = sum(layer["params_bytes"] for layer in info.values())
    assert chain.gradient_bytes.sum() == weights and chain.static_bytes.sum() == 4 * weights
    assert chain.stash_bytes.sum() == b * sum(layer["act_mem_bytes"] for layer in info.values())
    # its configuration: sequences of 2048, width 1024, 4 bytes
    assert chain.output_bytes.tolist() == [b * 2048 * 1024 * 4] * 25 + [0]
    # a block of 12 h^2 + 13 h parameters
    assert chain.gradient_bytes[1] == 4 * (12 * 1024**2 + 13 * 1024)

    types = ["RTX-3090", "RTX-3090", "RTX-2080", "RTX-2080", "Titan-RTX"]
    within, between = folder / "intra_node_bandwidths.json", folder / "multizone_bandwidths_het.json"
    bandwidth = importers.sailor_bandwidth(within, between, types, [0, 0, 1, 1, 2], "us-central1-a")
    assert bandwidth[0, 1] == json.loads(within.read_text())["RTX-3090"]["2"][1]
    zone = json.loads(between.read_text())["us-central1-a"]
    assert bandwidth[2, 4] == zone["RTX-2080"]["1"]["us-central1-a"]["Titan-RTX"]["1"][1]
    assert 0.1e9 < bandwidth[0, 2] < 0.125e9  # 1 Gbit/s Ethernet
    solve(chain.problem(types, [24e9, 24e9, 11e9, 11e9, 24e9], bandwidth, 50e-6, stages=3, micro_batches=8))


LAYER = {"params_bytes": 8.0, "act_output_bytes": 4.0, "act_mem_bytes": 6.0}
INFO = {"M": {"1": {"0": LAYER, "1": LAYER}, "2": {}}}
TIMES = {"2": {"1": {"0": [0.1, 0.2, 0.3], "1": [0.4, 0.5, 0.6]}, "4": {}}}


@pytest.mark.parametrize("info, times, size, model, message", [
    (INFO, TIMES, 3, "M", "times.json: micro_batch_size: 3; allowed: 2"),
    (INFO, TIMES, 0, "M", "^micro_batch_size: 0"),
    (INFO, TIMES, 2, "N", "info.json: model: N; allowed: M"),
    ({"M": {"2": {}}}, TIMES, 2, "M", "info.json: tensor-parallel degree: 1; allowed: 2"),
    ({"M": {"1": {}}}, TIMES, 2, "M", "info.json: layers: none; allowed: 0, 1, 2"),
    ({"M": {"1": {"0": LAYER, "2": LAYER}}}, TIMES, 2, "M", "info.json: layers: 2; allowed: 0, 1, 2"),
    ({"M": {"1": {"0": LAYER}}}, TIMES, 2, "M", "times.json: 2 layers; allowed: 1 as in .*info.json"),
    (INFO, {"2": {"4": {}}}, 2, "M", "times.json: tensor-parallel degree: 1; allowed: 4"),
    (INFO, {"2": {"1": {"0": [0.1, 0.2]}}}, 2, "M", "times.json: 2.1.0"),
    (INFO, {"2": {"1": {"0": [0.1, -0.2, 0.3]}}}, 2, "M", "times.json: 2.1.0.1: -0.2"),
    (INFO, [], 2, "M", "times.json: the file"),
])
def test_sailor_errors(tmp_path, info, times, size, model, message):
    (tmp_path / "info.json").write_text(json.dumps(info))
    (tmp_path / "times.json").write_text(json.dumps(times))
    with pytest.raises(InputError, match=message) as caught:
        importers.sailor({"GPU": tmp_path / "times.json"}, tmp_path / "info.json", model, size)
    assert "\n" not in str(caught.value)


def test_sailor_bandwidth_errors(tmp_path):
    within, between = tmp_path / "within.json", tmp_path / "between.json"
    within.write_text(json.dumps({"A": {"2": [[1, 2], 5e9]}, "B": {"4": [[], 5e9]}}))
    between.write_text(json.dumps({"z": {"A": {"1": {"z": {"A": {"1": [[], 1e9]}}}}}}))
    read = importers.sailor_bandwidth
    assert read(within, between, ["A"] * 3, [0, 0, 1], "z")[0].tolist() == [np.inf, 5e9, 1e9]
    for types, nodes, zone, message in (("AB", [0, 0], "z", "nodes: .*allowed: one type a node"),
                                        ("AA", [0], "z", "nodes"),
                                        ("BB", [0, 0], "z", "within.json: devices: 2; allowed: 4"),
                                        ("CC", [0, 0], "z", "within.json: type: C; allowed: A, B"),
                                        ("AA", [0, 1], "y", "between.json: zone: y; allowed: z"),
                                        ("AB", [0, 1], "z", "between.json: type: B; allowed: A")):
        with pytest.raises(InputError, match=message):
            read(within, between, list(types), nodes, zone)


# Problems


def small_chain():
    return MeasuredChain(("a", "b", "c"), ("X", "Y"), [[1, 2]] * 3, [[3, 4]] * 3, [5, 6, 0], [7] * 3, [8] * 3, [9] * 3)


def test_a_problem_places_types_on_devices():
    problem = small_chain().problem(["Y", "X", "Y"], [100, 200, 300], 1e9, 1e-6, 2, 4, "gpipe", "overlapped", 0.5)
    assert problem.forward_s[0].tolist() == [2, 1, 2] and problem.backward_s[0].tolist() == [4, 3, 4]
    assert problem.memory_bytes.tolist() == [50, 100, 150]
    assert problem.bandwidth_bytes_per_s[0, 1] == 1e9 and problem.latency_s[1, 0] == 1e-6
    assert (problem.schedule, problem.transfers, problem.stages, problem.micro_batches) == ("gpipe", "overlapped", 2, 4)


@pytest.mark.parametrize("changes, message", [
    ({"types": ["Z"]}, "types: 'Z'.*; allowed: X, Y"),
    ({"types": []}, "devices: 0; allowed: an integer from 1 to 1024"),
    ({"types": ["X"] * 1025}, "devices: 1025"),
    ({"memory_bytes": [1.0]}, "memory_bytes: shape"),
    ({"memory_bytes": float("nan")}, "memory_bytes"),
    ({"memory_bytes": "much"}, "memory_bytes: not an array of numbers"),
    ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s"),
    ({"latency_s": -1}, "latency_s"),
    ({"stages": 3}, "stages: 3; allowed: .*= 2"),
    ({"reserve": 1.0}, "reserve: 1.0; allowed: a fraction"),
])
def test_bad_problems(changes, message):
    fields = dict(types=["X", "Y"], memory_bytes=1e9, bandwidth_bytes_per_s=1e9, latency_s=0, stages=2, micro_batches=4)
    with pytest.raises(InputError, match=message):
        small_chain().problem(**(fields | changes))


# Hostile files


@given(st.data())
def test_any_changed_file_gives_a_chain_or_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    file = folder / "DeviceType.A_tp1_bs2.json"
    (folder / "info.json").write_text(json.dumps(INFO))
    text, read = data.draw(st.sampled_from([
        (GRAPH, lambda: importers.pipedream({"A": file})),
        (json.dumps(PIPER), lambda: importers.piper({"A": file})),
        (json.dumps(METIS), lambda: importers.metis(folder, 2, 1e6)),
        (json.dumps(TIMES), lambda: importers.sailor({"A": file}, folder / "info.json", "M", 2)),
    ]))
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[:data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        chain = read()
        problem = chain.problem(["A"] * 2, 1e12, 1e9, 0.0, 1, 2)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert problem.layers == chain.layers
