"""Random numbers for compiled loops (xorshift64*, Vigna 2016). The state is [1] uint64, not 0, and advances."""

import numpy as np
from numba import njit


@njit(cache=True, error_model="numpy")
def uniform(state):
    """Uniform in (0, 1)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return (np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) + 0.5) / 9007199254740992.0


@njit(cache=True, error_model="numpy")
def pick(state, n):
    """Uniform among 0 .. n - 1."""
    return min(int(uniform(state) * n), n - 1)
