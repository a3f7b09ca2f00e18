"""What the network reads of a problem. All costs enter as ratios to the balanced stage time or to a device's memory, so
that no unit matters.

Symbols: A batch of problems (equal K and S), L layers, K devices, S stages, M micro-batches.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .batch import Batch
from .schedule import in_flight
from .search import layer_work

GLOBAL_FEATURES, DEVICE_FEATURES, PAIR_FEATURES = 17, 9, 8
PLACES = 64  # of the way through the work, at which the network knows how large the layers' outputs are


class Features(NamedTuple):
    """A problems with equal K and S; float32."""

    globals: Tensor  # [A, GLOBAL_FEATURES]
    devices: Tensor  # [A, K, DEVICE_FEATURES]
    pairs: Tensor  # [A, K, K, PAIR_FEATURES]
    speed: Tensor  # [A, K] share of the summed speed
    rank: Tensor  # [A, K] place by falling speed
    link: Tensor  # [A, K, K] time of a whole transfer of the mean output / balanced stage time
    link_reduce: Tensor  # [A, K, K] time of moving all gradients / (M x balanced stage time)
    capacity: Tensor  # [A, K, 2] device memory / static bytes of the model, / stash bytes of the model
    in_flight: Tensor  # [A, S]
    outputs: Tensor  # [A, PLACES + 1] log (output / mean output) at the cut that is nearest to each part of the work
    stages: int


def features(problems: Batch) -> Features:
    """What the network reads of A problems with equal K, S, schedule and transfers."""
    p, S = problems, problems.stages
    A, K = p.memory_bytes.shape
    shapes = (GLOBAL_FEATURES,), (K, DEVICE_FEATURES), (K, K, PAIR_FEATURES), (K,), (K,), (K, K), (K, K), (K, 2)
    read = *(np.empty((A, *shape), np.float32) for shape in shapes), np.empty((A, PLACES + 1), np.float32)
    layer_s = p.forward_s + p.backward_s
    _read(p.forward_s, layer_s, layer_work(layer_s), p.output_bytes, p.stash_bytes, p.static_bytes, p.gradient_bytes,
          p.memory_bytes, p.bandwidth_bytes_per_s, p.latency_s, S, p.micro_batches, p.schedule == "gpipe",
          p.transfers == "overlapped", *read)
    return Features(*map(torch.from_numpy, read[:-1]), flight(p), torch.from_numpy(read[-1]), S)


def flight(problems: Batch) -> Tensor:
    """[A, S] the most micro-batches that each stage keeps."""
    row = in_flight(problems.schedule, problems.stages, problems.micro_batches).astype(np.float32)
    return torch.from_numpy(np.tile(row, (len(problems.memory_bytes), 1)))


@njit(cache=True, error_model="numpy")
def _read(all_forward, all_layer, all_work, all_output, all_stash, all_static, all_gradient, all_memory, all_bandwidth,
          all_latency, S, M, gpipe, overlapped, all_globals, all_devices, all_pairs, all_speed, all_rank, all_link,
          all_reduce, all_capacity, all_outputs):
    A, L, K = all_layer.shape
    to, transfer = np.empty((K, K)), np.empty((K, K))
    for a in range(A):
        layer_s, work, memory, speed = all_layer[a], all_work[a], all_memory[a], all_speed[a]
        devices, pairs, link = all_devices[a], all_pairs[a], all_link[a]
        reduce, capacity = all_reduce[a], all_capacity[a]
        total = np.zeros(K)  # the whole model on one device
        for i in range(L):
            for k in range(K):
                total[k] += layer_s[i, k]
        total = np.maximum(total, 1e-30)
        balanced = 1.0 / (1.0 / total).sum()  # stage time if the work were shared by speed
        output = all_output[a, :max(L - 1, 1)].mean()
        gradient = all_gradient[a].sum() / (M * balanced)
        row, column, nearest = np.zeros(K), np.zeros(K), np.full(K, np.inf if K > 1 else 0.0)
        for j in range(K):
            for k in range(K):
                s_per_byte = 1.0 / all_bandwidth[a, j, k] if j != k else 0.0
                transfer[j, k] = (all_latency[a, j, k] + output * s_per_byte) / balanced
                to[j, k] = _log(transfer[j, k])
                link[j, k] = min(transfer[j, k], 1e6)
                reduce[j, k] = min(gradient * s_per_byte, 1e6)
                pairs[j, k, 6] = _log(gradient * s_per_byte / S)
                row[j] += to[j, k] / max(K - 1, 1)
                column[k] += to[j, k] / max(K - 1, 1)
                if j != k:
                    nearest[j] = min(nearest[j], transfer[j, k])
        for j in range(K):
            for k in range(K):
                both = transfer[j, k] + transfer[k, j]
                pairs[j, k, 0], pairs[j, k, 1], pairs[j, k, 2] = to[j, k], to[k, j], _log(both)
                pairs[j, k, 3] = math.tanh(both)
                pairs[j, k, 4], pairs[j, k, 5] = to[j, k] - row[j], to[j, k] - column[k]
                pairs[j, k, 7] = _log(all_latency[a, j, k] / balanced)
            pairs[j, j] = 0.0
        static, stash = all_static[a].sum(), all_stash[a].sum()
        part = balanced / total
        rank = np.argsort(np.argsort(-part, kind="mergesort"), kind="mergesort")
        mean_memory = max(memory.mean(), 1.0)
        log_speed = np.log(part * K)
        for k in range(K):
            speed[k], all_rank[a, k] = part[k], rank[k]
            by_static, by_stash = memory[k] / (static + 1.0), memory[k] / (stash + 1.0)
            capacity[k, 0], capacity[k, 1] = min(max(by_static, 1e-6), 1e6), min(max(by_stash, 1e-6), 1e6)
            needed = part[k] * (static + stash * min(M, S)) + 1.0
            devices[k, 0], devices[k, 1] = log_speed[k], rank[k] / K
            devices[k, 2], devices[k, 3] = _clipped_log(memory[k] / needed), _clipped_log(by_static * S)
            devices[k, 4] = _clipped_log(by_stash)
            devices[k, 5], devices[k, 6], devices[k, 7] = row[k], column[k], _log(nearest[k])
            devices[k, 8] = _clipped_log(memory[k] / mean_memory)
        outputs = all_outputs[a]
        _read_outputs(all_output[a], work, outputs)
        g = all_globals[a]
        g[0], g[1], g[2], g[3], g[4] = math.log(S), math.log(M), S / K, math.log(K), math.log(L / S)
        g[5], g[6], g[7], g[8] = min(M / S, 8.0) / 4.0, 1.0 / S, work[0] * S, work[L - 1] * S
        g[9] = all_forward[a].sum() / max(layer_s.sum(), 1e-30)
        g[10], g[11] = gpipe, overlapped
        g[12], g[13], g[14], g[15] = row.mean(), log_speed.std(), row.std(), outputs.std()
        g[16] = _clipped_log((memory.sum() + 1.0) / (static + stash * min(M, S) / 2.0 + 1.0))


@njit(cache=True, error_model="numpy")
def _read_outputs(output, work, outputs):
    """Into outputs [PLACES + 1]; see Features."""
    L, last, cut = work.shape[0], outputs.shape[0] - 1, 0
    mean = output[:max(L - 1, 1)].mean() + 1e-9
    done = work[0]
    for place in range(last + 1):
        wanted = place / last
        while cut < L - 2 and abs(done + work[cut + 1] - wanted) < abs(done - wanted):
            cut += 1
            done += work[cut]
        ratio = math.log((output[cut] + 1e-9) / mean) if L > 1 else 0.0
        outputs[place] = min(max(ratio, -5.0), 5.0)


@njit(cache=True, error_model="numpy")
def _log(ratio):
    return (math.log(min(max(ratio, 0.0), 1e4) + 0.003) + 2.0) / 2.0


@njit(cache=True, error_model="numpy")
def _clipped_log(ratio):
    return min(max(math.log(ratio + 1e-9), -3.0), 3.0)


# what an ablation keeps from the network: the problem that it sees in place of the true one
BLIND = {
    "links": lambda p: replace(p, bandwidth_bytes_per_s=np.full_like(p.bandwidth_bytes_per_s, 1e30),
                               latency_s=np.zeros_like(p.latency_s)),
    "memory": lambda p: replace(p, memory_bytes=np.full_like(p.memory_bytes, 1e15)),
    "micro-batches": lambda p: replace(p, micro_batches=16),
    "stages": lambda p: replace(p, stages=p.memory_bytes.shape[1])}
