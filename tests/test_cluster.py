"""Clusters, environments and sampled problems against hand-made numbers and the invariants that they promise."""

import dataclasses
import doctest
import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nnpiper import cluster as cluster_module
from nnpiper import cost, simulator
from nnpiper.cluster import (DEVICES, ENVIRONMENTS, FABRICS, LINKS, PAIR_LINKS, Cluster, has_room, problem,
                             sample_problem)
from nnpiper.paths import DATA
from nnpiper.problem import InputError, Problem, Strategy
from nnpiper.profiles import KindTimes, Profile
from nnpiper.workload import MODELS, chain

ENVIRONMENT = st.sampled_from(list(ENVIRONMENTS))
SEED = st.integers(0, 2**32)


def off_diagonal(matrix):
    return matrix[~np.eye(len(matrix), dtype=bool)]


def draw(environment, seed, K, pool=None):
    return ENVIRONMENTS[environment](np.random.default_rng(seed), K, pool)


def test_every_catalogue_figure_has_a_source():
    text = json.loads((DATA / "hardware.json").read_text(encoding="utf-8"))
    assert text["link_fraction_source"]
    for name, entry in text["devices"].items():
        assert entry["source"] and entry["fraction_source"], name
        assert entry["node_link"] in LINKS, name
        # without a published figure the entry says so, in the flag and in words
        assert entry["assumed"] == ("no training figure found" in entry["fraction_source"]), name
        assert entry["assumed"] or "%" in entry["fraction_source"], name
    for name, entry in text["links"].items():
        assert entry["source"] and entry["latency_source"], name
        assert entry["assumed"] == ("no published figure" in entry["latency_source"]), name
    assert all(model.source for model in MODELS.values())


def test_catalogue_reaches_the_published_training_speeds():
    # Shoeybi et al. 2019: 39 TFLOP/s; llm-foundry's throughput table, TFLOP/s a GPU: A100-80 13b 185.9, H100 13b 393.7
    assert DEVICES["v100-32"].flops_per_s == pytest.approx(39e12, rel=0.05)
    assert DEVICES["a100-80"].flops_per_s == pytest.approx(185.9e12, rel=0.01)
    assert DEVICES["h100"].flops_per_s == pytest.approx(393.7e12, rel=0.01)
    # stas00/ml-engineering: 235 GB/s measured on the A100's NVLink
    assert LINKS["nvlink3"].bytes_per_s == pytest.approx(235e9, rel=0.03)


def test_a_cluster_by_hand():
    cluster = Cluster.from_nodes([("v100-32", 2), ("a100-80", 1)], "100gbe")
    assert cluster.device_names == ("v100-32", "v100-32", "a100-80")
    np.testing.assert_allclose(cluster.flops_per_s, [37.5e12, 37.5e12, 187.2e12])
    np.testing.assert_allclose(cluster.memory_bytes, [28.8e9, 28.8e9, 72e9])
    inf, nv, net = np.inf, 20e9, 10e9
    np.testing.assert_allclose(cluster.bandwidth_bytes_per_s, [[inf, nv, net], [nv, inf, net], [net, net, inf]])
    np.testing.assert_allclose(cluster.latency_s, np.array([[0, 11.8, 18], [11.8, 0, 18], [18, 18, 0]]) * 1e-6)
    assert cluster.node.tolist() == [0, 0, 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_time_is_flops_over_speed(recompute):
    work = chain("gpt2", micro_batch_size=2, recompute=recompute)
    cluster = Cluster.from_nodes([("v100-32", 1), ("a100-80", 1)], "25gbe")
    asked = problem(work, cluster, stages=2, micro_batches=3)
    # a block of GPT-2 small by hand: 24 b s h^2 + 4 b s^2 h
    block = 24 * 2 * 1024 * 768**2 + 4 * 2 * 1024**2 * 768
    np.testing.assert_allclose(asked.forward_s[5], [block / 37.5e12, block / 187.2e12])
    np.testing.assert_allclose(asked.backward_s[5], asked.forward_s[5] * (3 if recompute else 2))
    assert asked.forward_s[0].tolist() == [0.0, 0.0]
    assert (asked.stages, asked.micro_batches, asked.schedule, asked.transfers) == (2, 3, "1f1b", "blocking")
    np.testing.assert_array_equal(asked.static_bytes, work.static_bytes)
    np.testing.assert_array_equal(asked.memory_bytes, cluster.memory_bytes)
    # blocks 0 .. 5 on the V100: the stage's time and its transfer
    stages = cost.stage_arrays(asked, Strategy((7,), ((0,), (1,))))
    assert stages.forward_s[0] == pytest.approx(6 * block / 37.5e12)
    assert stages.send_forward_s[0] == pytest.approx(50e-6 + 2 * 2 * 1024 * 768 / 2.5e9)


@given(ENVIRONMENT, SEED, st.integers(1, 24))
def test_every_environment(environment, seed, K):
    cluster = draw(environment, seed, K)
    assert cluster.devices == K == len(cluster.node)
    for k, name in enumerate(cluster.device_names):
        assert cluster.flops_per_s[k] == DEVICES[name].flops_per_s > 0
        assert cluster.memory_bytes[k] == pytest.approx(0.9 * DEVICES[name].memory_bytes)
    bandwidth, latency = cluster.bandwidth_bytes_per_s, cluster.latency_s
    assert bandwidth.shape == latency.shape == (K, K)
    np.testing.assert_array_equal(bandwidth, bandwidth.T)
    np.testing.assert_array_equal(latency, latency.T)
    assert (bandwidth >= 0.999e9).all() and (off_diagonal(latency) > 1e-6).all()
    assert (np.diag(latency) == 0).all() and np.isinf(np.diag(bandwidth)).all()
    for array in (cluster.flops_per_s, cluster.memory_bytes, bandwidth, latency, cluster.node):
        assert not array.flags.writeable
    if environment != "realistic":
        slowest, fastest = (f(LINKS[name].bytes_per_s for name in PAIR_LINKS) for f in (min, max))
        assert ((off_diagonal(bandwidth) >= slowest * 0.999) & (off_diagonal(bandwidth) <= fastest * 1.001)).all()
        assert cluster.node.tolist() == list(range(K))
    if environment in ("homogeneous", "heterogeneous_network"):
        assert len(set(cluster.device_names)) == 1
    if environment in ("homogeneous", "heterogeneous_compute"):
        links = {(link.bytes_per_s, link.latency_s) for link in map(LINKS.get, PAIR_LINKS)}
        pairs = set(zip(off_diagonal(bandwidth), off_diagonal(latency)))
        assert len(pairs) == (K > 1) and pairs <= links
    again = draw(environment, seed, K)
    assert again.device_names == cluster.device_names
    np.testing.assert_array_equal(again.bandwidth_bytes_per_s, bandwidth)


@given(SEED, st.integers(2, 24))
def test_realistic_nodes(seed, K):
    cluster = draw("realistic", seed, K)
    nodes = [list(group) for _, group in itertools.groupby(range(K), key=cluster.node.__getitem__)]
    assert len(nodes) == len(set(cluster.node)) > 1  # devices of a node are neighbours, and there are several nodes
    assert all(len(node) <= 8 for node in nodes)
    assert all(len({cluster.device_names[k] for k in node}) == 1 for node in nodes)
    apart = cluster.node[:, None] != cluster.node[None, :]
    outside = set(cluster.bandwidth_bytes_per_s[apart])
    assert len(outside) == 1 and outside <= {LINKS[name].bytes_per_s for name in FABRICS}
    for i, j in itertools.permutations(range(K), 2):
        if cluster.node[i] == cluster.node[j]:
            inside = LINKS[DEVICES[cluster.device_names[i]].node_link]
            assert cluster.bandwidth_bytes_per_s[i, j] == inside.bytes_per_s
            assert cluster.latency_s[i, j] == inside.latency_s


def test_random_links_are_log_uniform_and_slow_ones_are_late():
    cluster = draw("completely_heterogeneous", 0, 200)
    pairs = np.triu_indices(200, 1)
    rate, latency = cluster.bandwidth_bytes_per_s[pairs], cluster.latency_s[pairs]
    place = np.log(rate / 1e9) / np.log(50.4)  # 10 Gbit/s Ethernet to PCIe 5.0, 80 % of each
    deciles = np.quantile(place, np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(deciles, np.linspace(0.1, 0.9, 9), atol=0.02)
    assert (np.diff(latency[np.argsort(rate)]) <= 0).all()
    assert latency.max() == pytest.approx(50e-6, rel=0.01) and latency.min() == pytest.approx(14.1e-6, rel=0.01)


def test_devices_are_drawn_evenly_and_in_no_order():
    rng = np.random.default_rng(1)
    names = np.array([ENVIRONMENTS["heterogeneous_compute"](rng, 10).device_names for _ in range(600)])
    expected = 6000 / len(DEVICES)
    for name in DEVICES:
        assert np.count_nonzero(names == name) == pytest.approx(expected, abs=5 * np.sqrt(expected))
    speed = np.vectorize(lambda name: DEVICES[name].flops_per_s)(names)
    by_position = speed.mean(axis=0)
    assert by_position == pytest.approx(speed.mean(), abs=5 * speed.std() / np.sqrt(600))


def test_a_pool_restricts_the_draw():
    for environment in ENVIRONMENTS:
        assert set(draw(environment, 3, 8, pool=("t4", "l4")).device_names) <= {"t4", "l4"}


def greedy_plan(asked):
    """The plan that `has_room` finds, by a plain loop."""
    order = sorted(range(asked.devices), key=lambda k: -asked.memory_bytes[k])[:asked.stages]
    cuts, lo = [], 0
    for s, k in enumerate(order):
        hi = lo + 1
        kept = min(asked.micro_batches, asked.stages - s) if asked.schedule == "1f1b" else asked.micro_batches
        while hi < asked.layers - (asked.stages - s - 1) and (
                asked.static_bytes[lo:hi + 1].sum() + kept * asked.stash_bytes[lo:hi + 1].sum()
                <= 0.8 * asked.memory_bytes[k]):
            hi += 1
        cuts.append(hi)
        lo = hi
    return Strategy(cuts[:-1], [(k,) for k in order]), lo == asked.layers


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpt2", "gpt3-2.7b", "gpt3-13b", "gpt3-39b", "llama3-8b", "t5-large"]), ENVIRONMENT, SEED,
       st.integers(8, 16), st.integers(4, 8), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([None, 1, 5]))
def test_sampled_problems_have_a_feasible_strategy(model, environment, seed, K, S, schedule, M):
    def sample():
        return sample_problem(np.random.default_rng(seed), model, environment, K, S, schedule, "overlapped", M)

    assume(model != "gpt3-39b" or S == 8)  # else refused, see test_models_that_do_not_fit
    asked = sample()
    assert (asked.stages, asked.devices, asked.schedule, asked.transfers) == (S, K, schedule, "overlapped")
    assert asked.micro_batches == (4 * S if M is None else M)
    plan, whole = greedy_plan(asked)
    assert whole and cost.overflow_bytes(asked, plan) == 0.0
    assert np.isfinite(simulator.step_time(asked, plan))
    assert asked.to_json() == sample().to_json()


def test_recomputation_only_where_it_is_needed():
    rng = np.random.default_rng(0)
    small = sample_problem(rng, "gpt2", "homogeneous", 4, 4)
    np.testing.assert_allclose(small.backward_s, 2 * small.forward_s)
    large = sample_problem(rng, "gpt3-39b", "homogeneous", 8, 8, schedule="gpipe")
    np.testing.assert_allclose(large.backward_s[1:-1], 3 * large.forward_s[1:-1])


def tiny(memory, schedule="1f1b"):
    """Four equal layers of 1 static and 1 stash byte, two stages, eight micro-batches."""
    K, ones = len(memory), np.ones(4)
    return Problem(forward_s=np.ones((4, K)), backward_s=np.ones((4, K)), output_bytes=ones, stash_bytes=ones,
                   static_bytes=ones, gradient_bytes=ones, memory_bytes=memory, bandwidth_bytes_per_s=np.ones((K, K)),
                   latency_s=np.zeros((K, K)), stages=2, micro_batches=8, schedule=schedule)


@pytest.mark.parametrize("memory, schedule, fits", [
    # 1F1B: a layer takes 1 + 2 bytes in the first stage, 1 + 1 in the second; the larger device comes first
    ([6, 4], "1f1b", True), ([4, 6], "1f1b", True), ([5.9, 4], "1f1b", False), ([9, 2], "1f1b", True),
    ([9, 1.9], "1f1b", False), ([100, 2], "1f1b", True), ([2, 2, 2, 2], "1f1b", False), ([6, 1, 4], "1f1b", True),
    # GPipe: 1 + 8 in both
    ([18, 18], "gpipe", True), ([17, 18], "gpipe", False), ([27, 9], "gpipe", True),
])
def test_has_room_by_hand(memory, schedule, fits):
    assert has_room(tiny(memory, schedule), room=1.0) == fits
    if fits:
        assert not has_room(tiny(memory, schedule), room=0.2)


@pytest.mark.parametrize("model, K, S", [("gpt3-175b", 16, 16), ("gpt3-39b", 16, 4), ("llama3-70b", 8, 8)])
def test_models_that_do_not_fit(model, K, S):
    with pytest.raises(InputError) as caught:
        sample_problem(np.random.default_rng(0), model, "completely_heterogeneous", K, S)
    need = chain(model).static_bytes.sum() / 1e9
    text = str(caught.value)
    assert "\n" not in text and "allowed" in text
    assert f"{need:.0f} GB" in text and f"{S * 180 * 0.9:.0f} GB usable" in text


def test_the_largest_model_runs_on_enough_devices():
    asked = sample_problem(np.random.default_rng(0), "gpt3-175b", "completely_heterogeneous", 32, 32)
    assert asked.memory_bytes.sum() > asked.static_bytes.sum() > 2.7e12


def test_names_of_a_cluster():
    cluster = Cluster.from_nodes([("v100-32", 2), ("a100-80", 1), ("rtx3090", 2)], "100gbe")
    assert cluster.labels == ("gpu0", "gpu1", "gpu2", "gpu3", "gpu4")
    assert cluster.titles == ("V100 SXM2 32 GB",) * 2 + ("A100 SXM4 80 GB",) + ("RTX 3090",) * 2
    assert cluster.title(3) == "gpu3 (RTX 3090)"
    assert cluster.node_names == ("node0", "node1", "node2")
    assert cluster.index_in_node == (0, 1, 0, 0, 1)
    assert cluster.measured == (None,) * 5


def test_a_cluster_of_own_arrays():
    rate = np.array([[0.0, 1e9, 2e9], [3e9, np.nan, 4e9], [5e9, 6e9, 7.0]])
    cluster = Cluster(("t4", "mine", "t4"), [26e12, 1e12, 26e12], [14e9, 8e9, 14e9], rate, np.ones((3, 3)), [0, 1, 0],
                      labels=("a", "b", "c"))
    assert [cluster.title(k) for k in range(3)] == ["a (T4)", "b (mine)", "c (T4)"]
    assert cluster.index_in_node == (0, 0, 1) and cluster.node_names == ("node0", "node1")
    assert rate[0, 0] == 0.0  # the caller's array stays as it was
    assert np.isinf(np.diag(cluster.bandwidth_bytes_per_s)).all() and not np.diag(cluster.latency_s).any()
    assert problem(chain("gpt2"), cluster, 2, 4).bandwidth_bytes_per_s[1, 0] == 3e9


def measured(kinds):
    times = {kind: KindTimes(forward, backward, 0.0, 0.0) for kind, (forward, backward) in kinds.items()}
    return Profile("My GPU", 20e9, MODELS["gpt2"], 1, 1024, False, "float16", times, 9, "cpu", "2.9", "2026-01-01")


def test_measured_times_replace_the_catalogue():
    profile = measured({"embedding": (1e-4, 2e-4), "block": (3e-3, 7e-3), "head": (5e-3, 8e-3)})
    cluster = Cluster.from_nodes([("v100-32", 1), ("a100-80", 1)], "25gbe")
    both = dataclasses.replace(cluster, measured=(None, profile))
    work = chain("gpt2", micro_batch_size=2)
    plain, asked = problem(work, cluster, 2, 4), problem(work, both, 2, 4)
    np.testing.assert_array_equal(asked.forward_s[:, 0], plain.forward_s[:, 0])
    np.testing.assert_array_equal(asked.backward_s[:, 0], plain.backward_s[:, 0])
    # twice the profiled micro-batch takes twice as long, but for the embedding's gradient, which has one size
    once = chain("gpt2")
    embedding = 2e-4 * (work.output_bytes[0] + work.gradient_bytes[0]) / (once.output_bytes[0] + once.gradient_bytes[0])
    np.testing.assert_allclose(asked.forward_s[:, 1], [2e-4] + [6e-3] * 12 + [1e-2])
    np.testing.assert_allclose(asked.backward_s[:, 1], [embedding] + [14e-3] * 12 + [16e-3])
    np.testing.assert_array_equal(asked.memory_bytes, plain.memory_bytes)


def test_a_profile_that_lacks_a_kind_names_the_device():
    cluster = Cluster.from_nodes([("v100-32", 1), ("a100-80", 1)], "25gbe")
    both = dataclasses.replace(cluster, measured=(None, measured({"block": (3e-3, 7e-3)})))
    with pytest.raises(InputError, match=r"^gpu1 \(A100 SXM4 80 GB\): .*'embedding'.*allowed: block$"):
        problem(chain("gpt2"), both, 2, 4)


@pytest.mark.parametrize("call, words", [
    (lambda rng: sample_problem(rng, "gpt2", "homogenous", 4, 4), ["environment: 'homogenous'", "'homogeneous'"]),
    (lambda rng: sample_problem(rng, "gpt-2", "realistic", 4, 4), ["model: 'gpt-2'", "did you mean 'gpt2'"]),
    (lambda rng: sample_problem(rng, "gpt2", "realistic", 4, 5), ["stages: 5", "1 to 4"]),
    (lambda rng: sample_problem(rng, "gpt2", "realistic", 32, 16), ["stages: 16", "1 to 14"]),
    (lambda rng: sample_problem(rng, "gpt2", "realistic", 4, 4, "1b1f"), ["schedule: '1b1f'"]),
    (lambda rng: ENVIRONMENTS["completely_heterogeneous"](rng, 0), ["devices: 0"]),
    (lambda rng: ENVIRONMENTS["realistic"](rng, 0), ["devices: 0"]),
])
def test_errors(call, words):
    with pytest.raises(InputError) as caught:
        call(np.random.default_rng(0))
    for word in words:
        assert word in str(caught.value)


def test_docstring_examples():
    assert doctest.testmod(cluster_module).failed == 0
