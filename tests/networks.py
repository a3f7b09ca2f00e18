"""Small networks for tests: quick, and with no weight at its starting value, as zeros there would hide mistakes.

Symbols: A problems, N groupings for each, R divisions for each grouping, K devices, S stages.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nnpiper import cost
from nnpiper.batch import Batch
from nnpiper.features import Features
from nnpiper.network import Divisions, Encoding, Groupings, Network, Size, State
from nnpiper.problem import Strategy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other

TINY = Size(width=16, heads=2, depth=1, stage_width=8, stage_heads=2, stage_depth=1)


def lively(seed: int = 0, blind: str = "", size: Size = TINY) -> Network:
    """A network whose weights are all random."""
    generator = torch.Generator().manual_seed(seed)
    network = Network(size, blind)
    with torch.no_grad():
        for weight in network.parameters():
            spread = 1.2 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            weight.copy_(spread * torch.randn(weight.shape, generator=generator) + (weight == 1))
    return network.eval()


class Drawn(NamedTuple):
    """What a network drew."""

    f: Features
    e: Encoding
    groupings: Groupings
    divisions: Divisions
    log_share: Tensor  # [A, N, R, S]


def drawn(network: Network, problems: Batch, N: int, R: int = 1, seed: int = 0, greedy: bool = False) -> Drawn:
    """N groupings with R divisions each for each problem."""
    generator = torch.Generator().manual_seed(seed)
    f = network.features(problems)
    e = network.encode(f)
    groupings = network.draw(f, e, N, generator, greedy=greedy)
    divisions = network.divide(f, e, groupings)
    return Drawn(f, e, groupings, divisions, divisions.draw(R, generator, greedy=greedy))


def strategies(problems: Batch, d: Drawn) -> list[list[list[Strategy]]]:
    """What was drawn, for each problem, grouping and division; groups checked by plain rules."""
    A, N, R, S = d.log_share.shape
    K = d.f.speed.shape[1]
    states = problems.strategies(d.groupings.actions.numpy(), d.log_share.softmax(-1).double().numpy())
    found = [[[cost.decode(*(part[a, n * R + r] for part in states)) for r in range(R)] for n in range(N)]
             for a in range(A)]
    for a in range(A):
        for n in range(N):
            groups = []
            for action in d.groupings.actions[a, n].tolist():
                if action < K:
                    groups.append([action])
                elif action < 2 * K:
                    groups[-1].append(action - K)
            for strategy in found[a][n]:
                strategy.check(problems.problem(a))
                assert strategy.groups == Strategy((), groups).groups
    assert (np.sort(states[1]) == np.arange(K)).all()
    return found


def members(groupings: Groupings) -> Tensor:
    """[A, N, S, K] float, 1 where the device is in the stage, from the actions by plain rules."""
    A, N, K = groupings.actions.shape
    member = torch.zeros(A, N, groupings.starts.shape[2] - 1, K)
    for a in range(A):
        for n in range(N):
            stage = -1
            for action in groupings.actions[a, n].tolist():
                stage += action < K
                if action < 2 * K:
                    member[a, n, stage, action % K] = 1
    return member


def state_after(actions: Tensor, K: int) -> State:
    """The partial strategies [A, N, ...] after actions [A, N, t], by plain rules: k < K opens the next stage with
    device k, K + k lets k join the open stage, 2 K stops and leaves the rest unused."""
    A, N, _ = actions.shape
    used, group, before = torch.zeros(A, N, K, dtype=torch.bool), torch.zeros(A, N, K), torch.zeros(A, N, K)
    last, opened = torch.full((A, N), K), torch.zeros(A, N, dtype=torch.long)
    for a in range(A):
        for n in range(N):
            for action in actions[a, n].tolist():
                if action == 2 * K:
                    used[a, n] = True
                    continue
                if action < K:
                    before[a, n] = group[a, n]
                    group[a, n] = 0
                    opened[a, n] += 1
                group[a, n, action % K] = 1
                used[a, n, action % K] = True
                last[a, n] = action % K
    return State(used, group, before, last, opened)
