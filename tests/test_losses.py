"""The losses against their formulas, pair by pair, and the signs of their gradients."""

import math

import numpy as np
import pytest
import torch

from nnpiper import losses


def outcomes(rng, A, N):
    """Log probabilities, steps and bytes over memory, with ties and infeasible ones among them."""
    step_s = rng.choice([rng.uniform(1, 2, (A, N)), rng.integers(1, 4, (A, N)).astype(float)])
    overflow = np.where(rng.random((A, N)) < 0.4, rng.integers(1, 3, (A, N)) * 1e9, 0.0)
    return torch.from_numpy(rng.normal(-20, 8, (A, N))), step_s, overflow


def rankings(step_s, overflow):
    """Of each instance: its strategies, best first, and their (bytes over memory, step)."""
    for t, o in zip(step_s.tolist(), overflow.tolist()):
        key = list(zip(o, t))
        yield sorted(range(len(t)), key=key.__getitem__), key


def pair_loss(odds):
    return math.log(1 + math.exp(-odds))


def plain_pairwise(log_p, step_s, overflow):
    """The formula in `vcta`, pair by pair; equal strategies make no pair; mean over instances."""
    values = []
    for p, (ranking, key) in zip(log_p.tolist(), rankings(step_s, overflow)):
        total = norm = 0.0
        for rank, i in enumerate(ranking):
            for j in ranking[rank + 1:]:
                if key[i] < key[j]:
                    w = math.exp(-rank / losses.LEADER)
                    total += w * pair_loss(losses.BETA * (p[i] - p[j])) / losses.BETA
                    norm += w
        values.append(total / norm if norm else 0.0)
    return sum(values) / len(values)


def plain_best_against_spread(log_p, step_s, overflow):
    values = []
    for p, (ranking, key) in zip(log_p.tolist(), rankings(step_s, overflow)):
        best, N, each = ranking[0], len(ranking), []
        spread = {round(1 + i * (N - 2) / (losses.SPREAD - 1)) for i in range(losses.SPREAD)} if N > 1 else {}
        for rank in sorted(spread):
            other = ranking[rank]
            if key[other] != key[best]:
                scale = min(max(key[other][1] / key[best][1], 0.1), 10.0)
                each.append(pair_loss(losses.BETA * scale * (p[best] - p[other])) / losses.BETA)
        values.append(sum(each) / max(len(each), 1))
    return sum(values) / len(values)


def plain_self_labelling(log_p, step_s, overflow):
    return -np.mean([p[ranking[0]] for p, (ranking, _) in zip(log_p.tolist(), rankings(step_s, overflow))])


PLAIN = {losses.pairwise: plain_pairwise, losses.best_against_spread: plain_best_against_spread,
         losses.self_labelling: plain_self_labelling}


@pytest.mark.parametrize("loss", PLAIN, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("beta, leader", [(0.03, 4.0), (0.1, 1.0), (1.0, 100.0)])
def test_each_loss_is_its_formula(monkeypatch, loss, beta, leader):
    monkeypatch.setattr(losses, "BETA", beta)
    monkeypatch.setattr(losses, "LEADER", leader)
    rng = np.random.default_rng(0)
    for _ in range(40):
        drawn = outcomes(rng, int(rng.integers(1, 5)), int(rng.integers(1, 9)))
        assert loss(*drawn).item() == pytest.approx(PLAIN[loss](*drawn), rel=1e-6)


def test_pairwise_raises_the_better_and_lowers_the_worse():
    rng = np.random.default_rng(1)
    for _ in range(20):
        log_p, step_s, overflow = outcomes(rng, 3, 6)
        log_p.requires_grad_()
        losses.pairwise(log_p, step_s, overflow).backward()
        for gradient, (_, key) in zip(log_p.grad, rankings(step_s, overflow)):
            assert gradient.sum().abs() < 1e-6  # what one gains another loses
            if min(key) < max(key):  # gradient descent raises what has a negative gradient
                assert all(gradient[n] < 0 for n in range(6) if key[n] == min(key))
                assert all(gradient[n] > 0 for n in range(6) if key[n] == max(key))
            else:
                assert not gradient.any()


@pytest.mark.parametrize("loss", [losses.pairwise, losses.best_against_spread])
def test_equal_strategies_teach_nothing(loss):
    log_p = torch.tensor([[-1.0, -5.0, -9.0]], requires_grad=True)
    value = loss(log_p, np.full((1, 3), 2.0), np.zeros((1, 3)))
    value.backward()
    assert value.item() == 0 and not log_p.grad.any()


def test_policy_gradient_is_reinforce_with_the_mean_as_baseline():
    rng = np.random.default_rng(2)
    log_p, step_s, overflow = outcomes(rng, 4, 6)
    log_p.requires_grad_()
    losses.policy_gradient(log_p, step_s, overflow).backward()
    for gradient, t, o in zip(log_p.grad, step_s, overflow):
        costs = [2 * max(t) if over > 0 else time for time, over in zip(t, o)]
        mean = sum(costs) / 6
        deviation = math.sqrt(sum((c - mean) ** 2 for c in costs) / 6)
        assert gradient.tolist() == pytest.approx([(c - mean) / deviation / 24 for c in costs], rel=1e-5, abs=1e-9)


def test_imitation_makes_the_labels_likelier_whatever_they_cost():
    log_p, step_s, overflow = outcomes(np.random.default_rng(3), 4, 1)
    assert losses.imitation(log_p).item() == losses.imitation(log_p, step_s, overflow).item() == -log_p.mean().item()
