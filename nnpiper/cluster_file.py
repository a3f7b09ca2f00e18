"""Cluster files: a user's own devices and links, as TOML (*.toml) or as JSON of the same form (*.json).

    reserve = 0.10                    # of every device's memory, left to framework and fragmentation; the default

    [[devices]]                       # in the order of their numbers; within a node, that of CUDA
    device = "RTX 3090"               # catalogue name in any usual spelling, or any text where the figures are given
    count = 2                         # so many in a row, default 1
    node = "box-a"                    # either every entry names its node or none does: then there is one machine
    name = "left"                     # default gpu0, gpu1, ... by place; with a count, -0, -1, ... are appended
    achieved_TFLOPS = 30              # dense 16-bit TFLOP/s that training reaches, or else peak_TFLOPS and efficiency
    memory_GB = 24                    # nominal, GB = 10^9 bytes, before the reserve
    profile = "my_gpu.json"           # measured layer times in place of these rates; path relative to this file

    [links]                           # a link is a catalogue class or own figures with their units, one way
    inside = "PCIe 4.0"               # between devices of one node
    between = { "Gb/s" = 20, us = 50 }
    pairs = [{ ends = ["box-a", "box-b"], link = "100gbe", one_way = true }]
    matrix = { "GB/s" = [[...], ...], us = [[...], ...] }   # in place of the three above: K x K, row = sender

What a device entry does not give comes from its profile, then from the catalogue. A catalogue link carries 80 % of its
advertised rate; own figures are taken as what is reached, with no factor on them. Without `inside`, equal devices of a
node are joined by their catalogue link, unequal ones by the slower PCIe of the two where both use PCIe; any other pair
needs a link. A pair joins nodes or devices, both ways unless one_way; a node with itself means the inside of that node.
A pair of devices counts before a device and a node, that before two nodes, and these before inside and between.

Symbols: K devices.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from .cluster import DEVICES, LINKS, MAX_DEVICES, Cluster
from .cluster_schema import (GIGABYTES_PER_S, MICROSECONDS, TFLOPS, DeviceEntry, Links, check, device_name, hint, read,
                             shown)
from .problem import InputError
from .profiles import Profile


def load(path) -> Cluster:
    """Read a cluster file. Raises InputError: one line with file, field, value and what is allowed."""
    try:
        return build(read(path), Path(path).parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def build(document: dict, folder: Path | str = ".") -> Cluster:
    """The cluster of a parsed file; profiles are looked for in `folder`. Raises InputError with field, value and what
    is allowed.

    >>> cluster = build({"devices": [{"device": "RTX 3090"}, {"device": "rtx-2080-ti"}]})
    >>> cluster.title(1), cluster.bandwidth_bytes_per_s.tolist()[0][1]
    ('gpu1 (RTX 2080 Ti)', 12600000000.0)
    """
    file = check(document)
    K = sum(entry.count for entry in file.devices)
    if K > MAX_DEVICES:
        raise InputError(f"devices: {K} devices; allowed: 1 to {MAX_DEVICES}")
    node, node_names = _nodes(file.devices)
    labels = _labels(file.devices)
    found = [_device(f"devices.{i}", entry, Path(folder)) for i, entry in enumerate(file.devices)]
    found = [device for device, entry in zip(found, file.devices) for _ in range(entry.count)]
    names = tuple(device.name for device in found)
    rate, latency = _link_matrices(file.links, labels, names, node, node_names)
    return Cluster(
        device_names=names,
        flops_per_s=[device.flops_per_s for device in found],
        memory_bytes=np.array([device.memory_bytes for device in found]) * (1 - file.reserve),
        bandwidth_bytes_per_s=rate, latency_s=latency, node=node, labels=labels,
        titles=tuple(device.title for device in found), node_names=node_names,
        measured=tuple(device.profile for device in found))


# Devices


class _Found(NamedTuple):
    name: str
    title: str
    flops_per_s: float
    memory_bytes: float
    profile: Profile | None


def _nodes(entries):
    """[K] node index, and the names of the nodes in the order of the file."""
    named = [entry.node is not None for entry in entries]
    if any(named) and not all(named):
        raise InputError(f"devices.{named.index(False)}.node: missing; allowed: a name, since other entries have one; "
                         "without any, all devices stand in one machine")
    names = [entry.node or "node0" for entry in entries]
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.repeat([index[name] for name in names], [entry.count for entry in entries]), tuple(index)


def _labels(entries):
    labels = {}
    for i, entry in enumerate(entries):
        for n in range(entry.count):
            label = f"gpu{len(labels)}"
            if entry.name is not None:
                label = entry.name if entry.count == 1 else f"{entry.name}-{n}"
            if label in labels:
                raise InputError(f"devices.{i}.name: {label!r}: devices.{labels[label]} is called so; allowed: unique "
                                 "names (a device without one is called gpu and its place from 0)")
            labels[label] = i
    return tuple(labels)


def _device(where, entry, folder):
    known = DEVICES.get(device_name(entry.device or ""))
    profile = None
    if entry.profile is not None:
        try:
            profile = Profile.from_file(folder / entry.profile)
        except InputError as error:
            raise InputError(f"{where}.profile: {error}") from None
    flops_per_s = _flops_per_s(where, entry, known, profile)
    if entry.memory_GB is not None:
        memory_bytes = entry.memory_GB * 1e9
    elif profile is not None and profile.memory_bytes is not None:
        memory_bytes = profile.memory_bytes
    else:
        memory_bytes = known.memory_bytes if known else None
    if flops_per_s is None or memory_bytes is None:
        missing = " and no ".join(["speed"] * (flops_per_s is None) + ["memory_GB"] * (memory_bytes is None))
        got = "missing" if entry.device is None else (
            f"{entry.device!r}{hint(entry.device, DEVICES)}: not in the catalogue")
        raise InputError(f"{where}.device: {got}, and no {missing} given; allowed: one of {', '.join(DEVICES)}, or any "
                         "name with memory_GB and achieved_TFLOPS (or peak_TFLOPS and efficiency, or a profile)")
    title = known.short_title if known else entry.device
    if title is None and profile is not None:
        title = "".join(filter(str.isprintable, profile.device))[:60].strip()
    title = title or f"{flops_per_s / 1e12:g} TFLOP/s, {memory_bytes / 1e9:g} GB"
    name = device_name(entry.device) if known else title
    return _Found(name, title, flops_per_s, memory_bytes, profile)


def _flops_per_s(where, entry, known, profile):
    """What the entry, else its profile, else the catalogue says; None where none does."""
    achieved, peak, efficiency = entry.achieved_TFLOPS, entry.peak_TFLOPS, entry.efficiency
    product = peak is not None or efficiency is not None
    if profile is not None:
        if achieved is not None or product:
            raise InputError(f"{where}.profile: {shown(entry.profile)}: beside achieved_TFLOPS, peak_TFLOPS or "
                             "efficiency; allowed: measured times or these")
        return _measured_flops_per_s(where, profile)
    if achieved is not None:
        if product:
            raise InputError(f"{where}.achieved_TFLOPS: {achieved:g}: beside peak_TFLOPS or efficiency; "
                             "allowed: the achieved rate, or peak_TFLOPS and efficiency")
        return achieved * 1e12
    if not product:
        return known.flops_per_s if known else None
    if known:
        peak = known.peak_tflops if peak is None else peak
        efficiency = known.fraction if efficiency is None else efficiency
    for key, value in (("peak_TFLOPS", peak), ("efficiency", efficiency)):
        if value is None:
            raise InputError(f"{where}.{key}: missing; allowed: {DeviceEntry.model_fields[key].description}, since "
                             "peak_TFLOPS and efficiency go together")
    return peak * 1e12 * efficiency


def _measured_flops_per_s(where, profile):
    """Rate over the whole chain that was profiled."""
    try:
        chain = profile.chain()
        flops = float((chain.forward_flops + chain.backward_flops).sum())
        seconds = float(sum(times.sum() for times in profile.times(chain)))
    except InputError as error:
        raise InputError(f"{where}.profile: {error}") from None
    low, high = (1e12 * limit for limit in TFLOPS)
    if not (seconds > 0 and low * seconds <= flops <= high * seconds):
        raise InputError(f"{where}.profile: {flops:g} FLOPs in {seconds:g} s; allowed: {low:g} to {high:g} FLOP/s")
    return flops / seconds


# Links


def _link_matrices(links, labels, names, node, node_names):
    """[K, K] bytes/s and seconds."""
    if links.matrix is not None:
        return _full_matrices(links, len(labels))
    rate, latency = _default_inside(names)
    if links.inside is not None:
        rate[:], latency[:] = links.inside
    apart = node[:, None] != node
    rate[apart], latency[apart] = (np.nan, np.nan) if links.between is None else links.between
    _set_pairs(links.pairs, rate, latency, labels, node, node_names)
    np.fill_diagonal(rate, np.inf)
    missing = np.argwhere(np.isnan(rate))
    if len(missing):
        i, j = missing[0]
        field, ends = "inside", f"{labels[i]} ({names[i]}) to {labels[j]} ({names[j]})"
        if apart[i, j]:
            field, ends = "between", f"{node_names[node[i]]} to {node_names[node[j]]}"
        raise InputError(f"links.{field}: missing: no link is known from {ends}; allowed: "
                         f"{Links.model_fields[field].description}; or name the pair in links.pairs")
    return rate, latency


def _default_inside(names):
    """[K, K] bytes/s and seconds of the catalogue between devices of one node, NaN where it knows no link."""
    kinds = list(dict.fromkeys(name if name in DEVICES else None for name in names))
    table = np.full((2, len(kinds), len(kinds)), np.nan)
    for i, a in enumerate(kinds):
        for j, b in enumerate(kinds):
            if a is not None and b is not None:
                both = [DEVICES[a].node_link, DEVICES[b].node_link]
                if a == b or all(link.startswith("pcie") for link in both):
                    link = min((LINKS[link] for link in both), key=lambda link: link.bytes_per_s)
                    table[:, i, j] = link.bytes_per_s, link.latency_s
    place = [kinds.index(name if name in DEVICES else None) for name in names]
    return table[0][np.ix_(place, place)], table[1][np.ix_(place, place)]


def _set_pairs(pairs, rate, latency, labels, node, node_names):
    """Write the links of the pairs into the matrices, a pair of devices last."""
    ends_of = {name: (0, np.flatnonzero(node == i)) for i, name in enumerate(node_names)}
    unclear = {label for k, label in enumerate(labels) if label in ends_of and ends_of[label][1].tolist() != [k]}
    ends_of |= {label: (1, np.array([k])) for k, label in enumerate(labels)}
    resolved = []
    for p, pair in enumerate(pairs):
        for name in pair.ends:
            if name not in ends_of:
                raise InputError(f"links.pairs.{p}.ends: {shown(name)}: no node or device{hint(name, ends_of)}; "
                                 f"allowed: {', '.join([*ends_of][:30])}{', ...' if len(ends_of) > 30 else ''}")
            if name in unclear:
                raise InputError(f"links.pairs.{p}.ends: {name!r}: the name of a node and of a device that is not that "
                                 "node's only one; allowed: a name of one thing")
        (rank_a, a), (rank_b, b) = map(ends_of.get, pair.ends)
        if len(np.union1d(a, b)) < 2:
            raise InputError(f"links.pairs.{p}.ends: {shown(pair.ends)}: one device; allowed: two names of nodes or "
                             "devices, or twice a node of several devices")
        resolved.append((rank_a + rank_b, p, a, b))
    set_by = np.full(rate.shape, -1)  # rank of the pair that wrote a link
    for rank, p, a, b in sorted(resolved, key=lambda entry: entry[0]):
        cells = [np.ix_(a, b)] if pairs[p].one_way else [np.ix_(a, b), np.ix_(b, a)]
        if any((set_by[cell] == rank).any() for cell in cells):
            raise InputError(f"links.pairs.{p}.ends: {shown(pairs[p].ends)}: another pair gives a link of these, too; "
                             "allowed: each pair once, or once in each direction with one_way")
        for cell in cells:
            rate[cell], latency[cell] = pairs[p].link
            set_by[cell] = rank
        np.fill_diagonal(set_by, -1)


def _full_matrices(links, K):
    given = [field for field in ("inside", "between", "pairs") if getattr(links, field)]
    if given:
        raise InputError(f"links.matrix: given beside {', '.join(given)}; allowed: the matrix alone, or the others")
    matrix = links.matrix
    unit, rows, scale = "GB/s", matrix.gigabytes, 1e9
    if rows is None:
        unit, rows, scale = "Gb/s", matrix.gigabits, 1e9 / 8
    return (_square(f"links.matrix.{unit}", rows, K, GIGABYTES_PER_S) * scale,
            _square("links.matrix.us", matrix.us, K, MICROSECONDS) * 1e-6)


def _square(where, rows, K, limits):
    sizes = [len(row) for row in rows]
    if sizes != [K] * K:
        wrong = next((f"row {i} has {size} numbers" for i, size in enumerate(sizes) if size != K), f"{len(sizes)} rows")
        raise InputError(f"{where}: {wrong}; allowed: {K} rows of {K} numbers, one for each device in the file's order")
    array = np.array(rows, dtype=np.float64)
    np.fill_diagonal(array, limits[1])  # not read
    wrong = np.argwhere(~((array >= limits[0]) & (array <= limits[1])))
    if len(wrong):
        i, j = wrong[0]
        raise InputError(f"{where}.{i}.{j}: {array[i, j]:g}; allowed: {limits[0]:g} to {limits[1]:g}, save on the "
                         "diagonal, which is not read")
    return array
