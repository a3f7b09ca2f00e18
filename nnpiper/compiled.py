"""The network's forward pass for one problem, compiled: `Network.encode`, `draw` and `divide` in one call, without
torch's cost of a call, which is most of the time where matrices are small. A test holds both to each other.

Symbols: K devices, S stages, N groupings, D width, H heads, C link channels.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from torch import nn

from . import sampling
from .batch import assemble
from .features import Features
from .kernels import Blocks, dense, layer_norm, transform
from .network import CHANNELS, DISTANCES, POINTER_CLIP, SIGMA_RANGE, Network, as_array
from .readings import STAGE_FEATURES, read_stages


class Encoder(NamedTuple):
    """Weights of the encoder: matrices [in, out], constants and scales [out]."""

    device: np.ndarray
    device_shift: np.ndarray
    pair: np.ndarray
    pair_shift: np.ndarray
    pair_out: np.ndarray
    pair_out_shift: np.ndarray
    blocks: Blocks
    norm: np.ndarray
    norm_shift: np.ndarray
    parts: np.ndarray
    whole: np.ndarray
    whole_shift: np.ndarray
    nothing_yet: np.ndarray


class Divider(NamedTuple):
    """Weights of the divider."""

    stage: np.ndarray
    stage_shift: np.ndarray
    node: np.ndarray
    globals: np.ndarray
    globals_shift: np.ndarray
    distance: np.ndarray  # [2 DISTANCES + 1, depth x H]
    blocks: Blocks
    norm: np.ndarray
    norm_shift: np.ndarray
    out: np.ndarray
    out_shift: np.ndarray


class Compiled:
    """Draws strategies for one problem; a snapshot of the network's weights."""

    def __init__(self, network: Network):
        n, d = network, network.divider
        self.query = n.query_weights()
        self.heads, self.stage_heads = n.size.heads, n.size.stage_heads
        self.encoder = Encoder(*_pair(n.device_in), *_pair(n.pair_in[0]), *_pair(n.pair_in[2]), _blocks(n.encoder),
                               *_norm(n.node_norm), as_array(n.to_parts.weight.T), *_pair(n.to_whole),
                               as_array(n.nothing_yet))
        self.divider = Divider(*_pair(d.stage_in), as_array(d.node_in.weight.T), *_pair(d.global_in),
                               as_array(d.distance.weight), _blocks(d.blocks), *_norm(d.out[0]), *_pair(d.out[1]))

    def draw(self, f: Features, N: int, random: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions [1, N, K] of N groupings for the one problem of f, number 0 the likeliest, and mean and deviation
        [1, N, S] of the log shares of the work. `random` [1] uint64 is advanced."""
        parts = tuple(part.numpy() for part in f[:-1])
        return _draw(parts, self.encoder, self.divider, self.query, self.heads, self.stage_heads, f.stages, N, random)


def _pair(layer: nn.Linear):
    return as_array(layer.weight.T), as_array(layer.bias)


def _norm(layer: nn.LayerNorm):
    return as_array(layer.weight), as_array(layer.bias)


def _blocks(blocks):
    rows = ((*_norm(b.norm1), *_norm(b.norm2), *_pair(b.qkv), *_pair(b.proj), *_pair(b.mlp[0]), *_pair(b.mlp[2]))
            for b in blocks)
    return Blocks(*(np.stack(column) for column in zip(*rows)))


@njit(cache=True)
def _draw(parts, encoder, divider, query, heads, stage_heads, S, N, random):
    globals_, devices, pairs, speed, rank, link, link_reduce, capacity, flight, outputs = parts
    nodes, pointer = _encode(globals_[0], devices[0], pairs[0], speed, rank, outputs, encoder, heads)
    actions = sampling.draw(pointer, query, S, N, POINTER_CLIP, True, random)
    order, starts = assemble(actions, S)
    mean, sigma = np.empty((1, N, S), np.float32), np.empty((1, N, S), np.float32)
    K, D = nodes.shape
    width = divider.node.shape[1]
    seen = np.empty((K, width), np.float32)
    dense(nodes, divider.node, np.zeros(width, np.float32), False, seen)
    whole = np.empty((1, width), np.float32)
    dense(globals_, divider.globals, divider.globals_shift, False, whole)
    bias = _distances(divider.distance, S, stage_heads)
    share, values = np.empty(S, np.float32), np.empty((S, STAGE_FEATURES), np.float32)
    for n in range(N):
        read_stages(order[0, n], starts[0, n], speed[0], link[0], link_reduce[0], capacity[0], flight[0], outputs[0],
                    share, values)
        _divide(order[0, n], starts[0, n], speed[0], share, values, seen, whole[0], divider, bias,
                mean[0, n], sigma[0, n])
    return actions, mean, sigma


@njit(cache=True)
def _encode(globals_, devices, pairs, speed, rank, outputs, w, H):
    """[K, D] nodes and what the pointer needs of them."""
    K, D, C = devices.shape[0], w.norm.shape[0], CHANNELS
    given = np.empty((K, devices.shape[1] + globals_.shape[0]), np.float32)
    given[:, :devices.shape[1]] = devices
    given[:, devices.shape[1]:] = globals_
    x, nodes = np.empty((K, D), np.float32), np.empty((K, D), np.float32)
    dense(given, w.device, w.device_shift, False, x)
    hidden = np.empty((K * K, w.pair.shape[1]), np.float32)
    links = np.empty((K * K, w.pair_out.shape[1]), np.float32)
    dense(pairs.reshape(K * K, pairs.shape[2]), w.pair, w.pair_shift, True, hidden)
    dense(hidden, w.pair_out, w.pair_out_shift, False, links)
    links = links.reshape(K, K, links.shape[1])
    for b in range(w.blocks.norm1.shape[0]):
        transform(x, np.ascontiguousarray(links[:, :, b * H:(b + 1) * H]), w.blocks, b)
    layer_norm(x, w.norm, w.norm_shift, nodes)
    parts = np.empty((K, 5 * D), np.float32)
    dense(nodes, w.parts, np.zeros(5 * D, np.float32), False, parts)
    last = np.empty((1, K + 1, D), np.float32)
    last[0, :K] = parts[:, :D]
    last[0, K] = w.nothing_yet
    middle, whole = np.zeros((1, D), np.float32), np.empty((1, 1, D), np.float32)
    for k in range(K):
        middle[0] += nodes[k] / np.float32(K)
    dense(middle, w.whole, w.whole_shift, False, whole[0])
    keys = np.empty((1, D, 2 * K), np.float32)
    factor = np.float32(1.0 / math.sqrt(D))
    for k in range(K):
        for d in range(D):
            keys[0, d, k] = parts[k, 3 * D + d] * factor
            keys[0, d, K + k] = parts[k, 4 * D + d] * factor
    first = links.shape[2] - 3 * C
    open_links = np.ascontiguousarray(links[:, :, first:first + 2 * C]).reshape(1, K, K * 2 * C)
    earlier = np.ascontiguousarray(links[:, :, first + 2 * C:]).reshape(1, K, K * C)
    return nodes, sampling.Pointer(speed, rank, outputs, whole, last,
                                   np.ascontiguousarray(parts[:, D:2 * D]).reshape(1, K, D),
                                   np.ascontiguousarray(parts[:, 2 * D:3 * D]).reshape(1, K, D), keys, open_links,
                                   earlier)


@njit(cache=True)
def _distances(distance, S, H):
    """[depth, S, S, H] attention biases of stages by how far apart they are."""
    bias = np.empty((distance.shape[1] // H, S, S, H), np.float32)
    for b in range(bias.shape[0]):
        for s in range(S):
            for t in range(S):
                far = min(max(t - s, -DISTANCES), DISTANCES) + DISTANCES
                bias[b, s, t] = distance[far, b * H:(b + 1) * H]
    return bias


@njit(cache=True)
def _divide(order, starts, speed, share, values, seen, whole, w, bias, mean, sigma):
    """Mean and deviation [S] of the log shares for one grouping."""
    S, D = share.shape[0], seen.shape[1]
    x = np.empty((S, D), np.float32)
    dense(values, w.stage, w.stage_shift, False, x)
    for s in range(S):
        x[s] += whole
        for i in range(starts[s], starts[s + 1]):
            x[s] += np.float32(speed[order[i]] / share[s]) * seen[order[i]]
    for b in range(bias.shape[0]):
        transform(x, bias[b], w.blocks, b)
    normed, out = np.empty((S, D), np.float32), np.empty((S, 2), np.float32)
    layer_norm(x, w.norm, w.norm_shift, normed)
    dense(normed, w.out, w.out_shift, False, out)
    low, high = SIGMA_RANGE
    for s in range(S):
        mean[s] = math.log(share[s]) + out[s, 0]
        sigma[s] = low * (high / low) ** (1.0 / (1.0 + math.exp(-out[s, 1])))
