"""Random problems that tests share. Symbols: L layers, K devices, S stages, M micro-batches."""

import numpy as np

from nnpiper.problem import SCHEDULES, TRANSFERS, Problem


def random_problem(rng: np.random.Generator, K=None, L=None, S=None, M=None, schedule=None, transfers=None,
                   transfer_share=0.3, memory=None) -> Problem:
    """A problem whose devices, layers and directed links all differ; what is None is drawn.

    K from 1..4, L from 1..6, S from 1..min(L, K), M from 1..6, schedule and transfers from all there are.
    transfer_share: time of a mean transfer over that of a mean stage
    memory: usable bytes of a mean device, as a multiple of what a mean stage needs; None: ample everywhere
    """
    K = int(rng.integers(1, 5)) if K is None else K
    L = int(rng.integers(1, 7)) if L is None else L
    S = int(rng.integers(1, min(L, K) + 1)) if S is None else S
    M = int(rng.integers(1, 7)) if M is None else M
    work = 1e-3 * rng.uniform(0.5, 2.0, L)
    slowness = np.exp(rng.uniform(0.0, 2.0, K))  # a factor of up to e^2 between devices
    forward = work[:, None] * slowness * rng.uniform(0.8, 1.25, (L, K))
    backward = 2.0 * work[:, None] * slowness * rng.uniform(0.8, 1.25, (L, K))
    mean_stage_s = (forward + backward).mean() * L / S
    output = 1e6 * rng.uniform(0.5, 2.0, L)
    transfer_s = transfer_share * mean_stage_s * np.exp(rng.uniform(-1.5, 1.5, (K, K)))
    stash, static = 1e7 * rng.uniform(0.5, 2.0, L), 1e8 * rng.uniform(0.5, 2.0, L)
    mean_need = (static.sum() + stash.sum() * min(M, S)) / S
    usable = np.full(K, 1e15) if memory is None else memory * mean_need * rng.uniform(0.6, 1.4, K)
    schedule = str(rng.choice(SCHEDULES)) if schedule is None else schedule
    transfers = str(rng.choice(TRANSFERS)) if transfers is None else transfers
    # from negligible, so that replicas pay, to as large as the weights
    gradient = static / 8.0 * np.exp(rng.uniform(-6.0, 0.0))
    return Problem(
        forward_s=forward, backward_s=backward, output_bytes=output, stash_bytes=stash, static_bytes=static,
        gradient_bytes=gradient, memory_bytes=usable,
        bandwidth_bytes_per_s=1e6 / np.maximum(0.9 * transfer_s, 1e-15), latency_s=0.1 * transfer_s, stages=S,
        micro_batches=M, schedule=schedule, transfers=transfers)
