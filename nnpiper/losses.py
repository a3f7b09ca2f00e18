"""What the network is trained to do with the strategies it has drawn: five losses, of which VCTA uses the first.

Each takes log_p [A, N], the log probabilities of N strategies of each of A instances (with gradient), step_s [A, N]
their exact steps in s and overflow [A, N] their bytes over memory; feasible strategies are better than infeasible
ones. Each gives the mean over the instances.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

BETA = 0.1  # of the log odds: log probabilities of groupings of ten devices lie tens apart
SPREAD = 4  # strategies, from the second to the worst, that the best one is set against
LEADER = 4.0  # ranks over which a strategy's weight in the pairwise contrast falls by e


def best_against_spread(log_p: Tensor, step_s: np.ndarray, overflow: np.ndarray) -> Tensor:
    """VCTA's contrast (`vcta` has the formula), after BOPO (Liao et al. 2025): the best one against SPREAD others at even
    ranks, each pair's log odds scaled by the ratio of their steps. Equal ones make no pair."""
    chosen = spread(step_s, overflow)
    log_p = log_p.gather(1, torch.from_numpy(chosen))
    key = np.take_along_axis(np.stack([overflow, step_s], -1), chosen[..., None], 1)
    ratio = torch.from_numpy(key[:, 1:, 1] / key[:, :1, 1]).float().clamp(0.1, 10.0)
    differ = torch.from_numpy((key[:, 1:] != key[:, :1]).any(-1)).float()
    pairs = -functional.logsigmoid(BETA * ratio * (log_p[:, :1] - log_p[:, 1:])) * differ / BETA
    return (pairs.sum(1) / differ.sum(1).clamp(min=1)).mean()


def spread(step_s: np.ndarray, overflow: np.ndarray) -> np.ndarray:
    """[A, n] the numbers of the best strategy of each instance, first, and of SPREAD others at even ranks, fewer where
    N is less: those that `best_against_spread` reads, which gives of these alone what it gives of all."""
    N = step_s.shape[1]
    ranks = np.unique(np.linspace(1, N - 1, SPREAD).round().astype(int)) if N > 1 else np.zeros(0, int)
    return np.lexsort((step_s, overflow))[:, [0, *ranks]]


def pairwise(log_p: Tensor, step_s: np.ndarray, overflow: np.ndarray) -> Tensor:
    """Of any two the better one i shall become likelier than the worse one j: - log sigmoid(BETA (log p(i) - log p(j))) /
    BETA, weighted by exp(- rank(i) / LEADER), so that the best count most. Equal ones make no pair."""
    N = log_p.shape[1]
    sorted_p, key = _sorted(log_p, step_s, overflow)
    differ = torch.from_numpy((key[:, :, None] != key[:, None]).any(-1)).triu(1)
    weight = torch.exp(-torch.arange(N) / LEADER)[:, None] * differ
    pairs = -functional.logsigmoid(BETA * (sorted_p[:, :, None] - sorted_p[:, None])) * weight / BETA
    return (pairs.sum((1, 2)) / weight.sum((1, 2)).clamp(min=1e-6)).mean()


def self_labelling(log_p: Tensor, step_s: np.ndarray, overflow: np.ndarray) -> Tensor:
    """Cross entropy with the best drawn strategy as the label (Corsini et al. 2024)."""
    return -_sorted(log_p, step_s, overflow)[0][:, 0].mean()


def policy_gradient(log_p: Tensor, step_s: np.ndarray, overflow: np.ndarray) -> Tensor:
    """REINFORCE with the samples' mean as shared baseline (POMO, Kwon et al. 2020); the cost of a strategy over memory
    is twice the worst step."""
    cost = np.where(overflow > 0, 2 * step_s.max(1, keepdims=True), step_s)
    advantage = (cost - cost.mean(1, keepdims=True)) / (cost.std(1, keepdims=True) + 1e-12)
    return (torch.from_numpy(advantage).float() * log_p).mean()


def imitation(log_p: Tensor, *_: np.ndarray) -> Tensor:
    """Cross entropy with given strategies, all of them labels; what they cost does not enter."""
    return -log_p.mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "best-against-spread": best_against_spread, "pairwise": pairwise, "self-labelling": self_labelling,
    "policy-gradient": policy_gradient, "imitation": imitation}
# Of the losses that read only some of the strategies, which: f(step_s, overflow) gives their numbers [A, n], and the
# loss of these alone is that of all
READS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"best-against-spread": spread}


def _sorted(log_p, step_s, overflow):
    """log_p and [A, N, 2] (overflow, step), best first."""
    order = np.lexsort((step_s, overflow))
    key = np.take_along_axis(np.stack([overflow, step_s], -1), order[..., None], 1)
    return log_p.gather(1, torch.from_numpy(order)), key
