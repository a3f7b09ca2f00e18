"""The compiled forward pass gives what the network in torch gives, for any size, kind of problem and weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem
from networks import TINY, drawn, lively

from nnpiper import kernels, virtual
from nnpiper.batch import Batch
from nnpiper.compiled import Compiled
from nnpiper.network import Network, Size
from nnpiper.problem import SCHEDULES, TRANSFERS

SIZES = [  # K, S, L
    (1, 1, 1), (1, 1, 7), (5, 1, 6), (5, 5, 5), (4, 4, 9), (7, 3, 12), (16, 8, 40), (20, 20, 24), (40, 3, 60)]


def same_draws(network, problems, N, seed=0):
    """Draw from both with the same random numbers and hold every array to the other's."""
    d = drawn(network, problems, N, seed=seed, greedy=True)
    random = torch.randint(1, 2**62, (1,), generator=torch.Generator().manual_seed(seed)).numpy().astype(np.uint64)
    actions, mean, sigma = Compiled(network).draw(network.features(problems), N, random)
    # logits differ in the last digits, so that now and then two noisy ones swap; then the rest of the draws is another
    same = (actions == d.groupings.actions.numpy()).all(-1)[0]
    assert same[0] and same.sum() >= N - 1
    for part, expected in ((mean, d.divisions.mean), (sigma, d.divisions.sigma)):
        np.testing.assert_allclose(part[0, same], expected.detach().numpy()[0, same], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("K, S, L", SIZES)
@pytest.mark.parametrize("size", [TINY, Size(width=48, heads=6, depth=3, stage_width=20, stage_heads=5, stage_depth=2)])
def test_any_problem_and_any_size_of_network(K, S, L, size):
    rng = np.random.default_rng(K + S + L)
    for i, transfers in enumerate(TRANSFERS):
        problem = random_problem(rng, K=K, L=L, S=S, M=6, schedule=SCHEDULES[i], transfers=transfers, memory=1.0)
        same_draws(lively(K, size=size), Batch.of([problem]), 12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_virtual_instances(seed):
    rng = np.random.default_rng(seed)
    size = virtual.sizes(rng)
    network = lively(seed % 5, blind=str(rng.choice(["", "links", "memory", "micro-batches", "stages"])))
    same_draws(network, virtual.draw(rng, 1, **size), 4, seed)


def test_a_fresh_network():
    problem = random_problem(np.random.default_rng(3), K=8, L=20, S=4, M=8)
    same_draws(Network().eval(), Batch.of([problem]), 16)


@pytest.mark.parametrize("n, D, E", [(1, 1, 1), (3, 5, 7), (9, 64, 33), (4, 3, 8), (2, 130, 3)])
@pytest.mark.parametrize("relu", [False, True])
def test_dense_is_a_linear_layer(n, D, E, relu):
    rng = np.random.default_rng(0)
    x, weight, shift = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, D), (D, E), E))
    out = np.full((n, E), np.nan, np.float32)
    kernels.dense(x, weight, shift, relu, out)
    expected = x.astype(float) @ weight + shift
    np.testing.assert_allclose(out, np.maximum(expected, 0) if relu else expected, atol=1e-4)
