"""Clusters: devices and the links between them, catalogue GPUs by hand or drawn from an environment.

Symbols: K devices, L layers, S stages, M micro-batches. The catalogue (data/hardware.json) gives a source for every
figure and marks those that are assumptions. A device computes at its peak dense 16-bit rate times the fraction of it
that training reaches, one fraction for all layer sizes; its usable memory is the nominal size, with GB read as 10^9
bytes, less a reserve of 10 % for the framework and fragmentation. A link carries 80 % of its advertised one-way rate.
Clusters of a user's own, with figures of their own, come from `cluster_file`.

The paper names its environments without describing them; what follows is this artifact's choice. Devices are drawn
independently and evenly from the pool, so that their order carries no information.

- homogeneous: one device type, one link class between all pairs
- heterogeneous_compute: a device type for each device, one link class
- heterogeneous_network: one device type, a link of its own for each pair
- completely_heterogeneous: both
- realistic: nodes of 1, 2, 4 or 8 equal GPUs joined by their type's own link inside and one fabric between nodes; at
  least two nodes; the devices of a node are neighbours, as in a host file. Traffic that shares a node's interface is
  not slowed down.

A link of its own is drawn log-uniformly for each unordered pair, between the slowest and the fastest class that joins
two GPUs of any type: 10 Gbit/s Ethernet (1 GB/s reached) to PCIe 5.0 (50 GB/s). NVLink joins equal GPUs on one board
alone, so that it occurs in `realistic` only. Latency falls from the slowest class's to the fastest's in proportion to
the logarithm of the rate. All links are symmetric. The catalogue keeps to one vendor, since no vendor's communication
library joins its GPUs with another's.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from .cost import fill_memory
from .paths import DATA
from .problem import InputError, Problem, read_json
from .profiles import Profile
from .workload import MODELS, Workload, chain, check_count, find

RESERVE = 0.10  # of the memory: framework context, fragmentation
MAX_DEVICES = 1024
DRAWS = 32  # clusters drawn before small devices leave the pool
ROOM = 0.8  # of usable memory, which a sampled problem's own feasible plan keeps to


@dataclass(frozen=True)
class Device:
    """A catalogue entry; node_link joins equal devices of one node, `assumed` speaks of the fraction of the peak."""

    title: str
    peak_tflops: float
    memory_gb: float
    node_link: str
    source: str
    fraction: float
    fraction_source: str
    assumed: bool

    @property
    def flops_per_s(self) -> float:
        return self.peak_tflops * 1e12 * self.fraction

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def short_title(self) -> str:
        return self.title.removeprefix("NVIDIA ").removeprefix("GeForce ")


@dataclass(frozen=True)
class Link:
    """A link class, one direction; bytes_per_s is what large messages reach. `assumed` speaks of the latency."""

    title: str
    gigabytes_per_s: float
    source: str
    latency_us: float
    latency_source: str
    assumed: bool

    @property
    def bytes_per_s(self) -> float:
        return self.gigabytes_per_s * 1e9 * LINK_FRACTION

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6


@dataclass(frozen=True, eq=False)
class Cluster:
    """K devices and their links; arrays are copied and read-only, the diagonals of the links are not read.

    device_names: K names in DEVICES, or titles of devices that the catalogue does not have
    flops_per_s: [K] reached in training; `problem` does not read it where a profile is there
    memory_bytes: [K] usable
    bandwidth_bytes_per_s, latency_s: [K, K] row = sender; a device reaches itself at infinite rate
    node: [K] index of the machine; devices of one machine need not be neighbours
    labels: K unique names, by default gpu0, gpu1, ...
    titles: K, what each device is, by default as the catalogue calls it
    node_names: one a node index, by default node0, node1, ...
    measured: K profiles whose times replace FLOPs / flops_per_s in `problem`, or None, the default
    """

    device_names: tuple[str, ...]
    flops_per_s: np.ndarray
    memory_bytes: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    latency_s: np.ndarray
    node: np.ndarray
    labels: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    measured: tuple[Profile | None, ...] = ()

    def __post_init__(self):
        for name in ("flops_per_s", "memory_bytes", "bandwidth_bytes_per_s", "latency_s", "node"):
            array = np.array(getattr(self, name), dtype=int if name == "node" else np.float64)
            if array.ndim == 2:
                np.fill_diagonal(array, np.inf if name == "bandwidth_bytes_per_s" else 0.0)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        for name, default in {
            "labels": tuple(f"gpu{k}" for k in range(self.devices)),
            "titles": tuple(DEVICES[n].short_title if n in DEVICES else n for n in self.device_names),
            "node_names": tuple(f"node{i}" for i in range(self.node.max(initial=-1) + 1)),
            "measured": (None,) * self.devices,
        }.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or default)

    @property
    def devices(self) -> int:
        return len(self.device_names)

    @property
    def index_in_node(self) -> tuple[int, ...]:
        """K: how many devices before this one stand in its node, as CUDA numbers them on that machine."""
        return tuple(int((self.node[:k] == i).sum()) for k, i in enumerate(self.node))

    def title(self, k: int) -> str:
        """Device k as its user knows it.

        >>> Cluster.from_nodes([("rtx3090", 2)], "10gbe").title(1)
        'gpu1 (RTX 3090)'
        """
        return f"{self.labels[k]} ({self.titles[k]})"

    @classmethod
    def from_nodes(cls, nodes: list[tuple[str, int]], fabric: str, reserve: float = RESERVE) -> "Cluster":
        """Nodes of (device name, count) joined by the link class `fabric`. Raises InputError.

        >>> Cluster.from_nodes([("a100-80", 2), ("t4", 1)], "25gbe").node.tolist()
        [0, 0, 1]
        """
        between = find(LINKS, "fabric", fabric)
        names, node = [], []
        for i, (name, count) in enumerate(nodes):
            find(DEVICES, "device", name)
            check_count("count", count, MAX_DEVICES)
            names += [name] * count
            node += [i] * count
        check_count("devices", len(names), MAX_DEVICES)
        if not 0.0 <= reserve < 1.0:
            raise InputError(f"reserve: {reserve}; allowed: a fraction from 0 to below 1")
        node = np.array(node)
        inside = [LINKS[DEVICES[name].node_link] for name in names]
        same = node[:, None] == node[None, :]
        rate = np.where(same, [[link.bytes_per_s] for link in inside], between.bytes_per_s)
        latency = np.where(same, [[link.latency_s] for link in inside], between.latency_s)
        return _cluster(names, rate, latency, node, reserve)


def problem(workload: Workload, cluster: Cluster, stages: int, micro_batches: int, schedule: str = "1f1b",
            transfers: str = "blocking") -> Problem:
    """What a planner is asked: the workload on the cluster, time = FLOPs / reached FLOP/s, or as measured where a
    device has a profile. Raises InputError."""
    forward_s = workload.forward_flops[:, None] / cluster.flops_per_s
    backward_s = workload.backward_flops[:, None] / cluster.flops_per_s
    for k, profile in enumerate(cluster.measured):
        if profile is not None:
            try:
                forward_s[:, k], backward_s[:, k] = profile.times(workload)
            except InputError as error:
                raise InputError(f"{cluster.title(k)}: {error}") from None
    return Problem(
        forward_s=forward_s, backward_s=backward_s, output_bytes=workload.output_bytes,
        stash_bytes=workload.stash_bytes, static_bytes=workload.static_bytes,
        gradient_bytes=workload.gradient_bytes, memory_bytes=cluster.memory_bytes,
        bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s, latency_s=cluster.latency_s,
        stages=stages, micro_batches=micro_batches, schedule=schedule, transfers=transfers)


# Environments. Each draws K devices from `pool`, names in DEVICES; None stands for all of them.


def homogeneous(rng: np.random.Generator, K: int, pool: tuple[str, ...] | None = None) -> Cluster:
    """One device type, one link class."""
    return _cluster(_one_device(rng, K, pool), *_one_link(rng, K))


def heterogeneous_compute(rng: np.random.Generator, K: int, pool: tuple[str, ...] | None = None) -> Cluster:
    """A device type for each device, one link class."""
    return _cluster(_any_devices(rng, K, pool), *_one_link(rng, K))


def heterogeneous_network(rng: np.random.Generator, K: int, pool: tuple[str, ...] | None = None) -> Cluster:
    """One device type, a link of its own for each pair."""
    return _cluster(_one_device(rng, K, pool), *_any_links(rng, K))


def completely_heterogeneous(rng: np.random.Generator, K: int, pool: tuple[str, ...] | None = None) -> Cluster:
    """A device type for each device, a link of its own for each pair."""
    return _cluster(_any_devices(rng, K, pool), *_any_links(rng, K))


def realistic(rng: np.random.Generator, K: int, pool: tuple[str, ...] | None = None) -> Cluster:
    """Nodes of 1, 2, 4 or 8 equal GPUs, one fabric between them; the last node takes what is left of K."""
    check_count("devices", K, MAX_DEVICES)
    sizes = [size for size in (1, 2, 4, 8) if size <= max(1, K // 2)]
    nodes, left = [], K
    while left:
        count = min(left, int(rng.choice(sizes)))
        nodes.append((_draw(rng, tuple(pool or DEVICES)), count))
        left -= count
    return Cluster.from_nodes(nodes, _draw(rng, FABRICS))


ENVIRONMENTS = {generator.__name__: generator for generator in (
    homogeneous, heterogeneous_compute, heterogeneous_network, completely_heterogeneous, realistic)}


def sample_problem(rng: np.random.Generator, model: str, environment: str, K: int, S: int, schedule: str = "1f1b",
                   transfers: str = "blocking", micro_batches: int | None = None, micro_batch_size: int = 1) -> Problem:
    """A problem of a named model in a named environment that has a feasible strategy. Raises InputError.

    micro_batches: 4 S unless given, where the bubble becomes small (Huang et al. 2019, "GPipe", section 2.3)

    A drawn cluster is kept if `has_room` finds a plan, without recomputation or else with it. After every DRAWS
    clusters in vain the devices with the least memory leave the pool, so that large models run on large devices;
    where not even the largest devices have room, InputError says so.
    """
    generator = find(ENVIRONMENTS, "environment", environment)
    M = 4 * S if micro_batches is None else micro_batches
    workloads = [chain(model, micro_batch_size, recompute=recompute) for recompute in (False, True)]
    check_count("devices", K, MAX_DEVICES)
    check_count("stages", S, min(K, workloads[0].layers))
    static = workloads[0].static_bytes.sum()
    largest = max(DEVICES, key=lambda name: DEVICES[name].memory_gb)
    usable = S * DEVICES[largest].memory_bytes * (1 - RESERVE)
    sizes = sorted({device.memory_gb for device in DEVICES.values()}) if static <= usable else []
    for size in sizes:
        pool = tuple(name for name, device in DEVICES.items() if device.memory_gb >= size)
        for _ in range(DRAWS):
            cluster = generator(rng, K, pool)
            for workload in workloads:
                drawn = problem(workload, cluster, S, M, schedule, transfers)
                if has_room(drawn):
                    return drawn
    raise InputError(
        f"model: {model!r} does not fit {S} stages: weights and optimizer state are {static / 1e9:.0f} GB, {S} of the "
        f"largest device ({largest}) have {usable / 1e9:.0f} GB usable, of which activations need a part and "
        f"{1 - ROOM:.0%} stays free; allowed: a smaller model or micro-batch, or more stages")


def has_room(problem: Problem, room: float = ROOM) -> bool:
    """True if `cost.fill_memory` finds a plan within `room` of every device's memory: then a strategy is feasible;
    False does not prove the contrary."""
    return fill_memory(problem, room) is not None


def _draw(rng, names):
    return names[int(rng.integers(len(names)))]


def _one_device(rng, K, pool):
    check_count("devices", K, MAX_DEVICES)
    return [_draw(rng, tuple(pool or DEVICES))] * K


def _any_devices(rng, K, pool):
    check_count("devices", K, MAX_DEVICES)
    return [_draw(rng, tuple(pool or DEVICES)) for _ in range(K)]


def _one_link(rng, K):
    link = LINKS[_draw(rng, PAIR_LINKS)]
    return np.full((K, K), link.bytes_per_s), np.full((K, K), link.latency_s)


def _any_links(rng, K):
    ends = sorted((LINKS[name] for name in PAIR_LINKS), key=lambda link: link.bytes_per_s)
    slow, fast = ends[0], ends[-1]
    place = np.triu(rng.random((K, K)), 1)
    place += place.T  # 0 is the slowest link, 1 the fastest
    rate = slow.bytes_per_s * (fast.bytes_per_s / slow.bytes_per_s) ** place
    return rate, slow.latency_s + (fast.latency_s - slow.latency_s) * place


def _cluster(names, rate, latency, node=None, reserve=RESERVE):
    devices = [DEVICES[name] for name in names]
    memory = np.array([device.memory_bytes for device in devices]) * (1 - reserve)
    return Cluster(tuple(names), [device.flops_per_s for device in devices], memory, rate, latency,
                   np.arange(len(names)) if node is None else node)


_Text = Annotated[str, Field(min_length=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _DeviceEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: _Text
    peak_tflops: _Positive
    memory_gb: _Positive
    node_link: _Text
    source: _Text
    fraction: Annotated[float, Field(gt=0, le=1)]
    fraction_source: _Text
    assumed: bool


class _LinkEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: _Text
    gigabytes_per_s: _Positive
    source: _Text
    latency_us: _Positive
    latency_source: _Text
    assumed: bool


class _HardwareFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    link_fraction: Annotated[float, Field(gt=0, le=1)]
    link_fraction_source: _Text
    devices: dict[str, _DeviceEntry]
    links: dict[str, _LinkEntry]


_hardware = read_json(DATA / "hardware.json", _HardwareFile)
LINK_FRACTION = _hardware.link_fraction
DEVICES: dict[str, Device] = {name: Device(**entry.model_dump()) for name, entry in _hardware.devices.items()}
LINKS: dict[str, Link] = {name: Link(**entry.model_dump()) for name, entry in _hardware.links.items()}
PAIR_LINKS = tuple(name for name in LINKS if not name.startswith("nvlink"))  # join two GPUs of any type
FABRICS = tuple(name for name in PAIR_LINKS if not name.startswith("pcie"))  # join two nodes
