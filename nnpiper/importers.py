"""Importers: measured layers in the files of Metis, Piper, PipeDream and Sailor, and problems made of them.

Symbols: L layers, K devices, T device types that were measured. Every importer gives a `MeasuredChain`, whose `problem`
places its types on devices. One device is one GPU; of what the files hold for tensor parallelism above 1, Sailor's
alone is read: there a device may be the GPUs that share every layer.

What the files leave open is filled in by these rules:

- optimizer: Adam, 16 bytes a parameter, as in workload.py: in 32-bit training weight, gradient, momentum and variance
  of 4 bytes each. PipeDream, Sailor and Metis state the bytes of the weights alone, so that static_bytes is 16 / 4 of
  them and gradient_bytes is as large as they are. Piper states its static memory itself, which is taken as it is; its
  published sample counts twice the weights there, which leaves nothing for an optimizer's state.
- forward and backward: Piper and Metis state their sum. The backward pass does twice the forward's matrix products,
  with recomputation three times (workload.py), so that the forward pass is a third, or a quarter, of the sum.
- stash: PipeDream states outputs alone. A node is counted to keep its output; what it keeps inside is not known.
- graphs: PipeDream's and Piper's nodes may branch; measured.py says how they become a chain. Where one node's output
  is a part of another's (PipeDream's __getitem__), both are counted: an upper bound.
- once a step: the time of the optimizer's update (Metis, Sailor) has no place in a Problem and is left out.
"""

import os
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .cluster import MAX_DEVICES
from .measured import MeasuredChain, crossing_bytes, order
from .problem import InputError, read_json, read_text
from .profile_formats import (GIBI, MAX_BYTES, MAX_LAYERS, MAX_SECONDS, MEBI, MetisCluster, MetisFile, PiperFile,
                              SailorBetween, SailorInfo, SailorProfile, SailorWithin)
from .workload import ADAM_BYTES, MAX_MICRO_BATCH_SIZE, check_count, find

WEIGHT_BYTES = 4  # of a parameter in the files


class _Node(NamedTuple):
    name: str
    forward_s: float
    backward_s: float
    stash_bytes: float
    static_bytes: float
    gradient_bytes: float


def pipedream(files: Mapping[str, str | Path]) -> MeasuredChain:
    """The graph.txt that PipeDream's profiler writes, one file for each type of device: {type: path}.

    A line a node, `node1 -- name -- forward_compute_time=.., backward_compute_time=.., activation_size=..,
    parameter_size=..` in ms and bytes, where a list of sizes `[a; b]` counts as its sum, and a line an edge,
    `node1 -- node2`. Raises InputError: one line with file, line, field, value and what is allowed.
    """
    return _from_graphs(files, _pipedream_graph)


_NODE = re.compile(r"(\S+) -- (.*) -- forward_compute_time=([^,]*), backward_compute_time=([^,]*), "
                   r"activation_size=([^,]*), parameter_size=([^,]*?)( -- stage_id=\d+)?")


def _pipedream_graph(path):
    nodes, edges = {}, []
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        parts = _NODE.fullmatch(line)
        if parts is None:
            edge = line.split(" -- ")
            if len(edge) != 2:
                raise InputError(f"{where}: {_short(line)}; allowed: node -- name -- forward_compute_time=.., "
                                 "backward_compute_time=.., activation_size=.., parameter_size=.., or node -- node")
            edges.append((where, *edge))
            continue
        node, title = parts[1], parts[2].split("(")[0].strip()
        if node in nodes:
            raise InputError(f"{where}: node {node!r} again; allowed: each node once")
        forward, backward = (_number(f"{where}: {field}", text, MAX_SECONDS * 1e3) * 1e-3 for field, text in (
            ("forward_compute_time", parts[3]), ("backward_compute_time", parts[4])))
        sizes = parts[5][1:-1].split(";") if re.fullmatch(r"\[.*]", parts[5]) else [parts[5]]
        activation = sum(_number(f"{where}: activation_size", size, MAX_BYTES) for size in sizes)
        weights = _number(f"{where}: parameter_size", parts[6], MAX_BYTES)
        nodes[node] = _Node(f"{node} {title}", forward, backward, activation, ADAM_BYTES / WEIGHT_BYTES * weights,
                            weights)
    for where, *edge in edges:
        _check_ends(where, edge, nodes)
    return nodes, {(a, b): nodes[a].stash_bytes for _, a, b in edges}


def piper(files: Mapping[str, str | Path], variant: str = "vanilla") -> MeasuredChain:
    """Piper's JSON workloads, one file for each type of device: {type: path}.

    variant: the id of the entry that is read of each node for one device, in the published files "vanilla" or
    "activation recomp". A node takes timePerSample for both passes, keeps memoryUsageA a micro-batch in flight and
    memoryUsageB always, and all-reduces parameterSize. Raises InputError: one line with file, field, value and what is
    allowed.
    """
    return _from_graphs(files, lambda path: _piper_graph(path, variant))


def piper_devices(path, name: str) -> tuple[tuple[str, ...], float, float]:
    """(types, memory_bytes, bandwidth_bytes_per_s) of a Piper file's devices, which are all of the type `name`."""
    file = read_json(path, PiperFile)
    return (name,) * file.maxDevices, file.maxMemoryPerDevice, file.bandwidth


def _piper_graph(path, variant):
    file = read_json(path, PiperFile)
    forward_share = 1 / 4 if "recomp" in variant else 1 / 3
    nodes = {}
    for i, entry in enumerate(file.nodes):
        if entry.id in nodes:
            raise InputError(f"{path}: nodes.{i}.id: {entry.id} again; allowed: each node once")
        entries = {each.id: each for each in entry.TMPCs.get("1", ())}
        if variant not in entries:
            raise InputError(f"{path}: nodes.{i}.TMPCs.1: no entry {variant!r}; allowed: "
                             f"{', '.join(entries) or 'none'}")
        cost = entries[variant]
        nodes[entry.id] = _Node(
            f"{entry.id} {entry.name}".strip(), cost.timePerSample * forward_share,
            cost.timePerSample * (1 - forward_share), cost.memoryUsageA, cost.memoryUsageB, cost.parameterSize)
    edges = {}
    for i, edge in enumerate(file.edges):
        ends = edge.sourceId, edge.destId
        _check_ends(f"{path}: edges.{i}", ends, nodes)
        edges[ends] = max(edge.communicationCost, edges.get(ends, 0.0))
    return nodes, edges


def metis(folder: str | Path, batch_size: int, output_bytes: float | None = None) -> MeasuredChain:
    """Metis's profiles in a folder: DeviceType.X_tp1_bsM.json of every type X, with M = batch_size.

    output_bytes: what a layer sends on for a micro-batch, which Metis takes as batch x sequence x hidden; where it is
    None, the files' activation_parameters_bytes are read

    A layer's memory with one micro-batch in flight is layer_memory_total_mb (the largest over the types, in 2^20
    bytes): static_bytes as far as they go, the rest is stash. Raises InputError: one line with file, field, value and
    what is allowed.
    """
    check_count("batch_size", batch_size, MAX_MICRO_BATCH_SIZE)
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                         "allowed: a folder") from None
    found = [m for name in names if (m := re.fullmatch(r"DeviceType\.(\w+?)_tp1_bs([1-9]\d{0,5})\.json", name))]
    paths = {m[1]: Path(folder, m[0]) for m in found if int(m[2]) == batch_size}
    if not paths:
        sizes = ", ".join(map(str, sorted({int(m[2]) for m in found}))) or "none"
        raise InputError(f"{folder}: no DeviceType.X_tp1_bs{batch_size}.json; allowed for batch_size: {sizes}")
    files = {name: read_json(path, MetisFile) for name, path in paths.items()}
    first = next(iter(files.values()))
    L = len(first.execution_time.layer_compute_total_ms)
    for name, file in files.items():
        for field, values in (("execution_time.layer_compute_total_ms", file.execution_time.layer_compute_total_ms),
                              ("execution_memory.layer_memory_total_mb", file.execution_memory.layer_memory_total_mb),
                              ("model.parameters.parameters_per_layer_bytes",
                               file.model.parameters.parameters_per_layer_bytes),
                              ("model.parameters.activation_parameters_bytes",
                               file.model.parameters.activation_parameters_bytes)):
            if values is not None and len(values) != L:
                raise InputError(f"{paths[name]}: {field}: {len(values)} numbers; allowed: {L}, one a layer as in "
                                 f"layer_compute_total_ms of {next(iter(paths.values())).name}")
    outputs = first.model.parameters.activation_parameters_bytes
    if output_bytes is not None:
        if not isinstance(output_bytes, Real) or not 0 <= output_bytes <= MAX_BYTES:
            raise InputError(f"output_bytes: {output_bytes!r}; allowed: a number from 0 to {MAX_BYTES:g}")
        outputs = [float(output_bytes)] * L
    if outputs is None:
        raise InputError("output_bytes: None; allowed: the bytes that a layer sends on, since "
                         f"{next(iter(paths.values()))} has no model.parameters.activation_parameters_bytes")
    weights = np.array(first.model.parameters.parameters_per_layer_bytes)
    memory = MEBI * np.max([file.execution_memory.layer_memory_total_mb for file in files.values()], axis=0)
    static = np.minimum(ADAM_BYTES / WEIGHT_BYTES * weights, memory)
    both = 1e-3 * np.transpose([file.execution_time.layer_compute_total_ms for file in files.values()])
    return MeasuredChain(tuple(f"layer {i}" for i in range(L)), tuple(files), both / 3, both * 2 / 3,
                         [*outputs[:-1], 0.0], memory - static, static, weights)


def metis_devices(hostfile, cluster_file) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """(types, memory_bytes [K], bandwidth_bytes_per_s [K, K]) of Metis's hostfile and cluster file.

    The hostfile has a line a node, `IP 8` or `IP slots=8`; the cluster file says for each IP instance_type, memory in
    2^30 bytes, intra_bandwidth and inter_bandwidth. A link between two nodes is as fast as the slower one's. Metis's
    documents give bandwidths in bytes/s, its sample files and its code in GB/s: from 1e6 on a number is taken to be
    bytes/s, below to be GB/s, since no link is that slow or that fast. Raises InputError.
    """
    known = read_json(cluster_file, MetisCluster).root
    hosts, node = [], []
    for number, line in _lines(hostfile):
        parts = re.fullmatch(r"(\S+)\s+(?:slots=)?(\d{1,6})", line)
        if not parts or not 1 <= int(parts[2]) <= MAX_DEVICES - len(node):
            raise InputError(f"{hostfile}: line {number}: {_short(line)}; allowed: IP and number of devices, at most "
                             f"{MAX_DEVICES} in all")
        try:
            host = find(known, "host", parts[1])
        except InputError as error:
            raise InputError(f"{hostfile}: line {number}: {error}") from None
        node += [len(hosts)] * int(parts[2])
        hosts.append(host)
    if not hosts:
        raise InputError(f"{hostfile}: no lines; allowed: one line a node, IP and number of devices")
    inside, between = (np.array([_metis_bandwidth(getattr(hosts[i], field)) for i in node])
                       for field in ("intra_bandwidth", "inter_bandwidth"))
    node = np.array(node)
    bandwidth = np.where(node[:, None] == node, inside, np.minimum(between[:, None], between))
    return (tuple(hosts[i].instance_type for i in node), np.array([hosts[i].memory * GIBI for i in node]), bandwidth)


def _metis_bandwidth(value):
    return value if value >= 1e6 else value * 1e9


def sailor(files: Mapping[str, str | Path], info_file, model: str, micro_batch_size: int, tensor_parallel: int = 1,
           shared_card: bool = False) -> MeasuredChain:
    """Sailor's profiles, one file for each type of device: {type: path}, and its llm_info.json.

    A profile is {micro-batch size: {tensor-parallel degree: {layer: [forward s, backward s, update s]}}}, the info file
    {model: {tensor-parallel degree: {layer: bytes}}} for one sequence: stash act_mem_bytes and output act_output_bytes
    grow with the micro-batch.

    tensor_parallel: the GPUs of one node that together are a device; bytes are those of one of them
    shared_card: whether these GPUs reach other nodes over one network card. Then the gradients of all of them count,
        since each reduces its own part with its counterparts on the other nodes, all at the same time.

    Raises InputError: one line with file, field, value and what is allowed.
    """
    check_count("micro_batch_size", micro_batch_size, MAX_MICRO_BATCH_SIZE)
    check_count("tensor_parallel", tensor_parallel, MAX_DEVICES)
    entries, degree = read_json(info_file, SailorInfo).root, str(tensor_parallel)
    layers = _layers(_at(info_file, _at(info_file, entries, "model", model), "tensor-parallel degree", degree),
                     info_file)
    times = []
    for path in _some(files).values():
        sizes = _at(path, read_json(path, SailorProfile).root, "micro_batch_size", str(micro_batch_size))
        times.append(_layers(_at(path, sizes, "tensor-parallel degree", degree), path))
        if len(times[-1]) != len(layers):
            raise InputError(f"{path}: {len(times[-1])} layers; allowed: {len(layers)} as in {info_file}")
    weights = np.array([layer.params_bytes for layer in layers])
    return MeasuredChain(
        tuple(f"layer {i}" for i in range(len(layers))), tuple(files),
        np.transpose([[forward for forward, _, _ in each] for each in times]),
        np.transpose([[backward for _, backward, _ in each] for each in times]),
        [micro_batch_size * layer.act_output_bytes for layer in layers[:-1]] + [0.0],
        [micro_batch_size * layer.act_mem_bytes for layer in layers],
        ADAM_BYTES / WEIGHT_BYTES * weights, weights * (tensor_parallel if shared_card else 1))


def sailor_bandwidth(within_file, between_file, types, nodes, zone: str) -> np.ndarray:
    """[K, K] bytes/s between K devices in one zone, row = sender: the peaks of Sailor's two bandwidth files.

    within_file: {type: {devices: [coefficients, peak]}}, read at 2 devices; between_file: {zone: {type: {devices of the
    node: {zone: {type: {devices: [coefficients, peak]}}}}}}, read at 1 device on either side
    types, nodes: K types and K names of nodes; the devices of a node are of one type. Raises InputError.
    """
    if len(types) != len(nodes) or len(set(zip(types, nodes))) > len(set(nodes)):
        raise InputError(f"nodes: {list(nodes)} with types {list(types)}; allowed: one type a node")
    check_count("devices", len(types), MAX_DEVICES)
    within = read_json(within_file, SailorWithin).root
    between = read_json(between_file, SailorBetween).root
    out = np.full((len(types), len(types)), np.inf)
    for i, sender in enumerate(types):
        for j, receiver in enumerate(types):
            if nodes[i] == nodes[j] and i != j:
                _, out[i, j] = _at(within_file, _at(within_file, within, "type", sender), "devices", "2")
            elif i != j:
                entry = between
                for field, key in (("zone", zone), ("type", sender), ("devices", "1"), ("zone", zone),
                                   ("type", receiver), ("devices", "1")):
                    entry = _at(between_file, entry, field, key)
                _, out[i, j] = entry
    return out


# Shared by the importers


def _from_graphs(files, read):
    graphs = {name: read(path) for name, path in _some(files).items()}
    first = next(iter(files))
    nodes, edges = graphs[first]
    for name, (others, other_edges) in graphs.items():
        if others.keys() != nodes.keys() or other_edges.keys() != edges.keys():
            raise InputError(f"{files[name]}: not the nodes and edges of {files[first]}; allowed: one graph for all "
                             "types")
    if not 1 <= len(nodes) <= MAX_LAYERS:
        raise InputError(f"{files[first]}: {len(nodes)} nodes; allowed: 1 to {MAX_LAYERS}")
    try:
        placed = order(list(nodes), edges)
    except InputError as error:
        raise InputError(f"{files[first]}: {error}") from None
    layers = [nodes[node] for node in placed]
    return MeasuredChain(
        tuple(layer.name for layer in layers), tuple(files),
        [[graph[node].forward_s for graph, _ in graphs.values()] for node in placed],
        [[graph[node].backward_s for graph, _ in graphs.values()] for node in placed],
        crossing_bytes(placed, edges), *([getattr(layer, field) for layer in layers] for field in (
            "stash_bytes", "static_bytes", "gradient_bytes")))


def _some(files):
    if not files:
        raise InputError("files: none; allowed: {type: path} for one or more types of device")
    return files


def _check_ends(where, edge, nodes):
    for node in edge:
        if node not in nodes:
            raise InputError(f"{where}: edge of node {node!r}; allowed: nodes of the file")


def _at(path, entries, field, key):
    """entries[key] of a file. Raises InputError."""
    if key not in entries:
        raise InputError(f"{path}: {field}: {key}; allowed: {', '.join(entries) or 'none'}")
    return entries[key]


def _layers(entries, path):
    """The values of {"0": .., "1": .., ...} in order."""
    names = [str(i) for i in range(len(entries))]
    if set(names) != entries.keys() or not 1 <= len(names) <= MAX_LAYERS:
        wrong = next((key for key in entries if key not in names), "none")
        raise InputError(f"{path}: layers: {wrong}; allowed: 0, 1, 2 and so on without a gap, at most {MAX_LAYERS}")
    return [entries[name] for name in names]


def _lines(path):
    """[(number from 1, stripped text)] of the lines of a UTF-8 file that are not empty. Raises InputError."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                         "allowed: a UTF-8 text file") from None
    return [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]


def _number(where, text, limit):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= limit:
        raise InputError(f"{where}: {_short(text.strip())}; allowed: a number from 0 to {limit:g}")
    return value


def _short(text):
    return repr(text if len(text) <= 60 else text[:57] + "...")
