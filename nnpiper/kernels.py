"""The layers of a small network, compiled: what torch computes too, without its microseconds for each call.

Symbols: n rows, D width, E outputs, H heads.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

EPSILON = 1e-5  # torch's LayerNorm


class Blocks(NamedTuple):
    """The weights of `depth` transformer blocks (network.Block): matrices [depth, in, out], the others [depth, .]."""

    norm1: np.ndarray
    norm1_shift: np.ndarray
    norm2: np.ndarray
    norm2_shift: np.ndarray
    qkv: np.ndarray
    qkv_shift: np.ndarray
    proj: np.ndarray
    proj_shift: np.ndarray
    up: np.ndarray
    up_shift: np.ndarray
    down: np.ndarray
    down_shift: np.ndarray


@njit(cache=True, fastmath=True, error_model="numpy")
def dense(x, weight, shift, relu, out):
    """out [n, E] = x [n, D] times weight [D, E] plus shift [E], with relu nothing below 0."""
    n, D = x.shape
    E = weight.shape[1]
    for i in range(n):
        row = out[i]
        for e in range(E):
            row[e] = shift[e]
        for d in range(0, D - 3, 4):  # four rows of the weights for one pass over the sums
            a, b, c, f = x[i, d], x[i, d + 1], x[i, d + 2], x[i, d + 3]
            for e in range(E):
                row[e] += a * weight[d, e] + b * weight[d + 1, e] + c * weight[d + 2, e] + f * weight[d + 3, e]
        for d in range(D - D % 4, D):
            a = x[i, d]
            for e in range(E):
                row[e] += a * weight[d, e]
        if relu:
            for e in range(E):
                row[e] = max(row[e], np.float32(0.0))


@njit(cache=True, fastmath=True, error_model="numpy")
def layer_norm(x, scale, shift, out):
    """Each row of x [n, D] to mean 0 and variance 1, times scale, plus shift."""
    n, D = x.shape
    for i in range(n):
        total = np.float32(0.0)
        for d in range(D):
            total += x[i, d]
        mean = total / np.float32(D)
        square = np.float32(0.0)
        for d in range(D):
            square += (x[i, d] - mean) * (x[i, d] - mean)
        factor = np.float32(1.0 / math.sqrt(square / D + EPSILON))
        for d in range(D):
            out[i, d] = (x[i, d] - mean) * factor * scale[d] + shift[d]


@njit(cache=True, fastmath=True, error_model="numpy")
def attend(qkv, bias, out):
    """Self-attention of n rows: qkv [n, 3 D], bias [n, n, H] added to the scores, out [n, D]."""
    n, D = out.shape
    H = bias.shape[2]
    width = D // H
    factor = np.float32(1.0 / math.sqrt(width))
    scores = np.empty(n, np.float32)
    for h in range(H):
        for i in range(n):
            most = np.float32(-3e38)  # not infinity, which fastmath takes for impossible
            for j in range(n):
                dot = np.float32(0.0)
                for d in range(width):
                    dot += qkv[i, h * width + d] * qkv[j, D + h * width + d]
                scores[j] = dot * factor + bias[i, j, h]
                most = max(most, scores[j])
            total = np.float32(0.0)
            for j in range(n):
                scores[j] = math.exp(scores[j] - most)
                total += scores[j]
            for d in range(width):
                out[i, h * width + d] = 0.0
            for j in range(n):
                part = scores[j] / total
                for d in range(width):
                    out[i, h * width + d] += part * qkv[j, 2 * D + h * width + d]


@njit(cache=True)
def transform(x, bias, blocks, b):
    """Block number b on x [n, D], in place; bias [n, n, H]."""
    n, D = x.shape
    normed, qkv = np.empty((n, D), np.float32), np.empty((n, 3 * D), np.float32)
    change, up = np.empty((n, D), np.float32), np.empty((n, blocks.up.shape[2]), np.float32)
    layer_norm(x, blocks.norm1[b], blocks.norm1_shift[b], normed)
    dense(normed, blocks.qkv[b], blocks.qkv_shift[b], False, qkv)
    attend(qkv, bias, normed)
    dense(normed, blocks.proj[b], blocks.proj_shift[b], False, change)
    x += change
    layer_norm(x, blocks.norm2[b], blocks.norm2_shift[b], normed)
    dense(normed, blocks.up[b], blocks.up_shift[b], True, up)
    dense(up, blocks.down[b], blocks.down_shift[b], False, change)
    x += change
