"""Measured chains: layers whose times were measured on some types of device, and problems made of them.

Symbols: L layers, K devices, T device types that were measured.

Graphs of layers that branch become a chain by `order`, a topological order: nodes as they are listed, each as soon as
what it reads is there, and an input (a node that reads nothing) just before its first reader. What a stage boundary
carries is then, by `crossing_bytes`, every tensor that is made before it and read behind it, each once; where the edges
of one tensor have several sizes, the largest that crosses. Gradients are taken to be as large, also those of inputs
that need none.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from .cluster import MAX_DEVICES, RESERVE
from .problem import InputError, Problem
from .workload import check_count, find

BYTES_FIELDS = ("output_bytes", "stash_bytes", "static_bytes", "gradient_bytes")


@dataclass(frozen=True, eq=False)
class MeasuredChain:
    """A chain of L layers as measured on T types of device, for one micro-batch; arrays are read-only.

    layer_names: L; types: T
    forward_s, backward_s: [L, T]
    output_bytes, stash_bytes, static_bytes, gradient_bytes: [L] as in Problem
    """

    layer_names: tuple[str, ...]
    types: tuple[str, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    output_bytes: np.ndarray
    stash_bytes: np.ndarray
    static_bytes: np.ndarray
    gradient_bytes: np.ndarray

    def __post_init__(self):
        for name in ("forward_s", "backward_s", *BYTES_FIELDS):
            array = np.array(getattr(self, name), np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def layers(self) -> int:
        return len(self.layer_names)

    def problem(self, types, memory_bytes, bandwidth_bytes_per_s, latency_s, stages: int, micro_batches: int,
                schedule: str = "1f1b", transfers: str = "blocking", reserve: float = RESERVE) -> Problem:
        """This chain on K devices.

        types: K names in self.types; memory_bytes: of a whole device, a number or [K], of which `reserve` is kept free
        bandwidth_bytes_per_s, latency_s: a number for all links or [K, K], row = sender

        Raises InputError.
        """
        column = {name: t for t, name in enumerate(self.types)}
        columns = [find(column, "types", name) for name in types]
        K = len(columns)
        check_count("devices", K, MAX_DEVICES)
        if not 0.0 <= reserve < 1.0:
            raise InputError(f"reserve: {reserve}; allowed: a fraction from 0 to below 1")
        memory, bandwidth, latency = (value if np.ndim(value) else np.full(shape, value) for value, shape in (
            (memory_bytes, K), (bandwidth_bytes_per_s, (K, K)), (latency_s, (K, K))))
        whole = Problem(
            self.forward_s[:, columns], self.backward_s[:, columns], *(getattr(self, name) for name in BYTES_FIELDS),
            memory, bandwidth, latency, stages, micro_batches, schedule, transfers)
        return whole.replace(memory_bytes=whole.memory_bytes * (1 - reserve))


def order(ids: list, edges: dict[tuple, float]) -> list:
    """The topological order that this module's opening describes, of nodes with edges {(from, to): bytes}. Raises
    InputError where there is a cycle."""
    readers, sources = {node: [] for node in ids}, {node: [] for node in ids}
    for a, b in edges:
        readers[a].append(b)
        sources[b].append(a)
    waiting = {node for node in ids if not sources[node] and readers[node]}  # inputs that no placed node reads
    missing = {node: sum(source not in waiting for source in sources[node]) for node in ids}
    position = {node: i for i, node in enumerate(ids)}
    ready = [position[node] for node in ids if node not in waiting and not missing[node]]  # ascending: a heap
    placed = []
    while ready:
        node = ids[heapq.heappop(ready)]
        for source in sources[node]:
            if source in waiting:
                waiting.remove(source)
                placed.append(source)
        placed.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, position[reader])
    if len(placed) < len(ids):
        stuck = next(node for node in ids if missing[node])
        raise InputError(f"node {stuck!r} lies on or behind a cycle; allowed: a graph without cycles")
    return placed


def crossing_bytes(chain: list, edges: dict[tuple, float]) -> np.ndarray:
    """[L] bytes that cross the cut behind each node of an order, 0 behind the last."""
    place = {node: i for i, node in enumerate(chain)}
    read_at = {}
    for (a, b), size in edges.items():
        read_at.setdefault(place[a], []).append((place[b], size))
    out = np.zeros(len(chain))
    for made, reads in read_at.items():
        reads.sort(reverse=True)
        largest = 0.0
        for i, (behind, size) in enumerate(reads):
            largest = max(largest, size)
            out[(reads[i + 1][0] if i + 1 < len(reads) else made):behind] += largest
    return out
