"""Virtual instances: an endless supply of random problems, the only thing that VCTA trains on.

No model, device or measurement stands behind them: every cost is drawn, over ranges wide enough that real clusters
lie well inside. Times are relative to the balanced stage time (the stage time if the work were shared by speed).
"""

from dataclasses import dataclass

import numpy as np

from .batch import Batch


@dataclass(frozen=True)
class Ranges:
    """What virtual instances are drawn from (bounds included)."""

    devices: tuple[int, int] = (3, 64)
    devices_usual: int = 16  # seven in ten draws have at most so many
    layers_most: int = 200
    micro_batches: tuple[int, int] = (2, 256)
    speed_spread: tuple[float, float] = (0.2, 2.0)  # half range of log speed
    transfer: tuple[float, float] = (0.002, 4.0)  # of a micro-batch over a typical link / balanced stage time
    link_spread: tuple[float, float] = (0.2, 2.3)  # half range of log link time
    output_change: tuple[float, float] = (-6.0, 2.0)  # of log output size, from the first layer to the last


def sizes(rng: np.random.Generator, ranges: Ranges = Ranges()) -> dict:
    """One draw of what a batch has in common: K, S, L, M, schedule and transfers. Two in ten draws have S = K, which
    is the easier kind."""
    usual = ranges.devices_usual
    K = int(rng.integers(ranges.devices[0], usual + 1) if rng.random() < 0.7
            else _log_uniform(rng, usual + 1, ranges.devices[1] + 1))
    S = K if rng.random() < 0.2 else int(rng.integers(2, K))
    return {"K": K, "S": S, "L": int(_log_uniform(rng, max(S, 6), ranges.layers_most)),
            "M": int(_log_uniform(rng, ranges.micro_batches[0], ranges.micro_batches[1] + 1)),
            "schedule": "1f1b" if rng.random() < 0.7 else "gpipe",
            "transfers": "blocking" if rng.random() < 0.6 else "overlapped"}


def draw(rng: np.random.Generator, A: int, K: int, S: int, L: int, M: int, schedule: str, transfers: str,
         ranges: Ranges = Ranges()) -> Batch:
    """A virtual instances of one size."""
    work, static = _layers(rng, A, L)
    node = rng.integers(0, rng.integers(2, K + 1, (A, 1)), (A, K))  # which machine each device is in
    speed = _speeds(rng, node, ranges)
    layer_s = work[:, :, None] / speed[:, None]
    noise = 0.15 * (rng.random((A, 1, 1)) < 0.3)  # some devices are better at some layers
    layer_s = layer_s * np.exp(noise * rng.standard_normal((A, L, K)))
    layer_s *= 10.0 ** rng.uniform(-4, 0, (A, 1, 1))
    forward_part = 1.0 / np.where(rng.random((A, 1, 1)) < 0.6, 3.0, rng.uniform(2.0, 4.5, (A, 1, 1)))
    balanced = 1.0 / (1.0 / layer_s.sum(1)).sum(1)  # [A]

    output = 1e6 * _outputs(rng, A, L, ranges)
    link_s = _links(rng, node, ranges) * balanced[:, None, None]
    fixed = np.where(rng.random((A, 1, 1)) < 0.5, rng.uniform(0, 0.5, (A, 1, 1)) ** 2, 0.001)  # latency's part
    bandwidth = 1e6 / (link_s * (1 - fixed))
    latency = link_s * fixed
    gradient = _log_uniform(rng, 1.0, 100.0, (A, 1)) * 1e6 * static * L
    static = static * 1e10
    stash = _log_uniform(rng, 0.003, 1.0, (A, 1)) * 1e10 * (work * rng.uniform(0.5, 1.0, (A, 1)) + 0.5 / L)
    memory = _memory(rng, speed, static.sum(1), stash.sum(1), min(M, S) if schedule == "1f1b" else M)
    diagonal = np.arange(K)
    bandwidth[:, diagonal, diagonal], latency[:, diagonal, diagonal] = np.inf, 0.0
    return Batch(layer_s * forward_part, layer_s * (1 - forward_part), output, stash, static, gradient, memory,
                 bandwidth, latency, S, M, schedule, transfers)


def _layers(rng, A, L):
    """[A, L] work and static bytes of each layer, summing to 1: equal or unequal blocks between an embedding, light to
    compute, and a head that may be worth several blocks."""
    uneven = np.where(rng.random((A, 1)) < 0.5, 0.0, _log_uniform(rng, 0.02, 0.6, (A, 1)))
    work = np.exp(uneven * rng.standard_normal((A, L)))
    kinds = np.where(rng.random((A, 1)) < 0.2, _log_uniform(rng, 1.0, 3.0, (A, 1)), 1.0)  # two kinds of blocks in a row
    work *= np.where(np.arange(L) < L * rng.uniform(0.2, 0.8, (A, 1)), 1.0, kinds)
    static = work * np.exp(0.5 * uneven * rng.standard_normal((A, L)))
    work[:, 0], work[:, -1] = _log_uniform(rng, 0.003, 1.0, A), _log_uniform(rng, 0.3, 5.0, A)
    static[:, 0], static[:, -1] = _log_uniform(rng, 0.2, 6.0, (2, A))
    return work / work.sum(1, keepdims=True), static / static.sum(1, keepdims=True)


def _outputs(rng, A, L, ranges):
    """[A, L] size of each layer's output, 1 on average: all equal as in a transformer, or varied, or falling (now and
    then rising) from layer to layer as in a convolutional network."""
    kind = rng.random((A, 1))
    varied = 0.5 * (kind < 0.4) * rng.standard_normal((A, L))
    fall = np.where((0.2 < kind) & (kind < 0.5), rng.uniform(*ranges.output_change, (A, 1)), 0.0)
    size = np.exp(varied + fall * np.linspace(0, 1, L))
    return size / size.mean(1, keepdims=True)


def _speeds(rng, node, ranges):
    """[A, K]: equal devices, a few types, a type for each node, or all different."""
    A, K = node.shape
    spread = rng.uniform(*ranges.speed_spread, (A, 1))
    each = rng.uniform(-1, 1, (A, K))
    types = np.take_along_axis(rng.uniform(-1, 1, (A, 4)), rng.integers(0, rng.integers(2, 5, (A, 1)), (A, K)), 1)
    by_node = np.take_along_axis(each, node, 1)
    kind = rng.random((A, 1))
    return np.exp(spread * np.select([kind < 0.2, kind < 0.4, kind < 0.7], [np.zeros((A, K)), types, by_node], each))


def _links(rng, node, ranges):
    """[A, K, K] time of a typical transfer / balanced stage time: one link for all, each pair its own, or nodes with
    fast links inside; mostly the same both ways."""
    A, K = node.shape
    middle = _log_uniform(rng, *ranges.transfer, (A, 1, 1))
    spread = rng.uniform(*ranges.link_spread, (A, 1, 1))
    pair = np.triu(rng.uniform(-1, 1, (A, K, K)), 1)
    pair = spread * (pair + pair.transpose(0, 2, 1))
    inside = node[:, :, None] == node[:, None]
    fabric = np.where(rng.random((A, 1, 1)) < 0.5, 0.0, 0.5 * pair)
    nodes = np.where(inside, -_log_uniform(rng, 0.5, 4.0, (A, 1, 1)), fabric)
    kind = rng.random((A, 1, 1))
    log_time = np.where(kind < 0.15, 0.0, np.where(kind < 0.5, pair, nodes))
    one_way = 0.3 * (rng.random((A, 1, 1)) < 0.2)
    return middle * np.exp(log_time + one_way * rng.standard_normal((A, K, K)))


def _memory(rng, speed, static, stash, most_in_flight):
    """[A, K]: plentiful, or between just enough and four times what the model needs; partly in step with speed."""
    A, K = speed.shape
    size = np.exp(rng.uniform(0, 1, (A, 1)) * np.log(speed) + rng.uniform(0, 0.7, (A, 1)) * rng.uniform(-1, 1, (A, K)))
    needed = static + stash * (1 + most_in_flight) / 2
    tightness = np.where(rng.random(A) < 0.5, 1000.0, _log_uniform(rng, 1.1, 5.0, A))
    return size / size.sum(1, keepdims=True) * (needed * tightness)[:, None]


def _log_uniform(rng, low, high, shape=None):
    return np.exp(rng.uniform(np.log(low), np.log(high), shape))
