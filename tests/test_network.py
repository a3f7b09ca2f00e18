"""The network: any size in one set of weights, the problem's symmetries, and a distribution that is what it says."""

import math

import numpy as np
import pytest
import torch
from instances import random_problem
from networks import drawn, lively, members, state_after, strategies
from plans import all_strategies, odd_problem, shuffled
from slow_simulator import slow_memory, slow_stages

from nnpiper import readings, virtual
from nnpiper.batch import Batch
from nnpiper.compiled import Compiled
from nnpiper.features import PLACES, features
from nnpiper.network import SIGMA_RANGE, Groupings, Network, State
from nnpiper.problem import SHAPES, Strategy

SIZES = [  # K, S, L, M
    (1, 1, 1, 1), (1, 1, 7, 3), (5, 1, 6, 4), (5, 5, 5, 1), (4, 4, 9, 8), (6, 2, 2, 1), (7, 3, 12, 5), (20, 20, 24, 6),
    (20, 3, 100, 2)]


def batch(rng, A, K, S, L, M, **how):
    how = {"schedule": "1f1b", "transfers": "blocking", "memory": 1.0} | how
    return Batch.of([random_problem(rng, K=K, L=L, S=S, M=M, **how) for _ in range(A)])


def logits_after(network, f, e, prefix):
    """[2 K + 1] logits of one problem after a list of actions."""
    return network.logits(f, e, state_after(torch.tensor(prefix, dtype=torch.long)[None, None], f.speed.shape[1]))[0, 0]


def every_sequence(f, e, network):
    """All action sequences that the masks allow, with their log probability, by trying every branch."""
    K, out = f.speed.shape[1], []

    def branch(prefix, log_p):
        if len(prefix) == K:
            out.append((tuple(prefix), log_p))
            return
        logits = logits_after(network, f, e, prefix).double()
        for action in torch.isfinite(logits).nonzero()[:, 0].tolist():
            branch([*prefix, action], log_p + logits.log_softmax(-1)[action].item())

    branch([], 0.0)
    return out


@pytest.mark.parametrize("schedule, transfers", [("1f1b", "blocking"), ("gpipe", "overlapped")])
def test_one_set_of_weights_serves_every_size(schedule, transfers):
    rng, network = np.random.default_rng(0), lively()
    for K, S, L, M in SIZES:
        problems = batch(rng, 2, K, S, L, M, schedule=schedule, transfers=transfers)
        d = drawn(network, problems, 6, 2, greedy=True)
        strategies(problems, d)  # all valid
        groupings, divisions = network.log_prob(d.f, d.e, d.groupings), d.divisions.log_prob(d.log_share)
        assert groupings.shape == (2, 6) and divisions.shape == (2, 6, 2)
        assert torch.isfinite(groupings).all() and torch.isfinite(divisions).all()
        network.zero_grad()
        (groupings.sum() + divisions.sum()).backward()
        assert all(w.grad is None or torch.isfinite(w.grad).all() for w in network.parameters())


def test_a_fresh_network_divides_by_speed_and_every_weight_learns():
    network = Network(lively().size)
    problems = batch(np.random.default_rng(1), 3, 6, 3, 12, 4)
    d = drawn(network, problems, 8)
    share = (members(d.groupings) * d.f.speed[:, None, None]).sum(-1)
    assert torch.allclose(d.divisions.mean, share.log(), atol=1e-5)
    network = lively()
    d = drawn(network, problems, 8)
    loss = network.log_prob(d.f, d.e, d.groupings).square().sum() + d.divisions.log_prob(d.log_share).square().sum()
    loss.backward()
    still = [name for name, w in network.named_parameters() if w.grad is None or not w.grad.any()]
    assert still == []


def test_extreme_costs_stay_finite():
    """Zero FLOPs, zero bytes, huge and missing links, no memory, limits of the allowed values."""
    rng, network = np.random.default_rng(2), lively()
    problems = [odd_problem(rng, random_problem(rng, K=4, L=5, S=2, M=3, memory=1.0)) for _ in range(40)]
    plain = random_problem(rng, K=4, L=5, S=2, M=3)
    zero, K, L = np.zeros(5), 4, 5
    nothing = np.zeros((L, K))
    problems += [
        plain.replace(forward_s=nothing, backward_s=nothing),
        plain.replace(output_bytes=zero, stash_bytes=zero, static_bytes=zero, gradient_bytes=zero),
        plain.replace(memory_bytes=np.zeros(K)), plain.replace(memory_bytes=np.full(K, 1e30)),
        plain.replace(bandwidth_bytes_per_s=np.full((K, K), 1e-6), output_bytes=np.full(L, 1e30)),
        plain.replace(forward_s=nothing + 1e30), plain.replace(forward_s=nothing + 1e-30, backward_s=nothing),
        plain.replace(forward_s=np.where(np.arange(K) == 0, 0.0, plain.forward_s), backward_s=nothing),
        plain.replace(forward_s=np.where(np.arange(K) == 0, 1e30, plain.forward_s)),
        plain.replace(latency_s=np.full((K, K), 1e30), static_bytes=np.full(L, 1e30), stash_bytes=np.full(L, 1e30))]
    for problem in problems:
        one = Batch.of([problem])
        d = drawn(network, one, 4)
        assert all(torch.isfinite(part).all() for part in d.f[:-1])
        strategies(one, d)
        assert torch.isfinite(network.log_prob(d.f, d.e, d.groupings)).all()
        assert torch.isfinite(d.divisions.log_prob(d.log_share)).all()
        actions, mean, sigma = Compiled(network).draw(d.f, 4, np.array([5], np.uint64))
        assert ((0 <= actions) & (actions <= 2 * K)).all() and np.isfinite(mean).all() and (sigma > 0).all()


@pytest.mark.parametrize("K, S", [(5, 5), (6, 3), (9, 4)])
def test_renaming_the_devices_renames_the_answer(K, S):
    rng, network = np.random.default_rng(3), lively()
    for _ in range(5):
        problem = random_problem(rng, K=K, L=12, S=S, M=6, memory=1.0)
        other, old = shuffled(rng, problem)
        new = np.argsort(old)  # new name of each old device
        f, e, plans, divisions, _ = drawn(network, Batch.of([problem]), 16)
        g, h, *_ = drawn(network, Batch.of([other]), 1)
        actions = plans.actions.numpy()
        device, kind = actions % K, actions // K
        renamed = torch.from_numpy(np.where(kind == 2, actions, new[device] + K * kind))
        columns = torch.from_numpy(np.concatenate([old, K + old, [2 * K]]))  # column of the old logits for each new one
        for t in range(K):
            before = network.logits(f, e, state_after(plans.actions[:, :, :t], K))
            after = network.logits(g, h, state_after(renamed[:, :, :t], K))
            torch.testing.assert_close(after, before[..., columns], atol=1e-4, rtol=1e-4)
        for part, expected in zip(network.divider(g, h, new[plans.order], plans.starts), divisions):
            torch.testing.assert_close(part, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
def test_the_unit_of_time_and_of_bytes_does_not_matter(factor):
    rng = np.random.default_rng(4)
    for _ in range(10):
        problem = random_problem(rng, K=5, L=8, S=3, M=4, memory=1.0)
        seconds = problem.replace(forward_s=factor * problem.forward_s, backward_s=factor * problem.backward_s,
                                  latency_s=factor * problem.latency_s,
                                  bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s / factor)
        size = problem.replace(**{name: factor * getattr(problem, name) for name in (
            "output_bytes", "stash_bytes", "static_bytes", "gradient_bytes", "memory_bytes", "bandwidth_bytes_per_s")})
        for scaled in (seconds, size):
            for part, expected in zip(features(Batch.of([scaled])), features(Batch.of([problem]))):
                torch.testing.assert_close(part, expected, atol=1e-4, rtol=1e-4)


def test_problems_of_a_batch_do_not_see_each_other():
    network, problems = lively(), batch(np.random.default_rng(5), 4, 6, 3, 9, 5)
    f, e, plans, divisions, _ = drawn(network, problems, 5)
    together = network.log_prob(f, e, plans), *divisions
    for a in range(4):
        g = network.features(Batch.of([problems.problem(a)]))
        h, states = network.encode(g), State(*(part[a:a + 1] for part in plans.states))
        one = Groupings(*(part[a:a + 1] if part is not plans.states else states for part in plans))
        for part, expected in zip((network.log_prob(g, h, one), *network.divide(g, h, one)), together):
            torch.testing.assert_close(part, expected[a:a + 1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("K, S, L, M", SIZES)
def test_only_allowed_actions_are_drawn(K, S, L, M):
    """Counted plainly: S groups opened, no device twice, members of a group by falling speed, stop for good."""
    problems = batch(np.random.default_rng(6), 2, K, S, L, M)
    f, _, plans, *_ = drawn(lively(), problems, 64)
    for a in range(2):
        for actions in plans.actions[a].tolist():
            seen, opened, last, stopped = set(), 0, None, False
            for action in actions:
                if action == 2 * K:
                    assert opened == S
                    stopped = True
                    continue
                device = action % K
                assert not stopped and device not in seen
                if action < K:
                    opened += 1
                else:
                    assert opened > 0 and f.speed[a, device] <= f.speed[a, last]
                    assert K - len(seen) > S - opened  # enough left for the stages to come
                seen.add(device)
                last = device
            assert opened == S


@pytest.mark.parametrize("K, S", [(1, 1), (3, 1), (3, 2), (4, 2), (4, 4), (5, 3)])
def test_every_grouping_can_be_drawn_in_exactly_one_way(K, S):
    problem = random_problem(np.random.default_rng(7), K=K, L=S, S=S)  # L = S: the cuts are given
    network = lively()
    f, e, *_ = drawn(network, Batch.of([problem]), 1)
    found = []
    for actions, _ in every_sequence(f, e, network):
        groups = []
        for action in actions:
            if action < K:
                groups.append([action])
            elif action < 2 * K:
                groups[-1].append(action - K)
        found.append(Strategy(tuple(range(1, S)), groups))
    assert len(found) == len(set(found)) and set(found) == set(all_strategies(problem))


def test_draws_follow_the_distribution_that_log_prob_states():
    """All sequences of a small problem sum to 1, and 20,000 draws come in these proportions (chi-square)."""
    network, problems = lively(3), batch(np.random.default_rng(8), 1, 3, 2, 5, 4)
    f, e, plans, divisions, log_share = drawn(network, problems, 20_000)
    chance = {actions: math.exp(log_p) for actions, log_p in every_sequence(f, e, network)}
    assert sum(chance.values()) == pytest.approx(1.0, abs=1e-5)
    drawn_counts = dict.fromkeys(chance, 0)
    for actions in plans.actions[0].tolist():
        drawn_counts[tuple(actions)] += 1  # KeyError: a sequence that the masks do not allow
    square = sum((drawn_counts[a] - 20_000 * p) ** 2 / (20_000 * p) for a, p in chance.items() if 20_000 * p > 5)
    freedom = sum(20_000 * p > 5 for p in chance.values())
    assert freedom > 8 and square < freedom + 4 * math.sqrt(2 * freedom)
    mean, sigma = divisions
    z = ((log_share[:, :, 0] - mean) / sigma).flatten()
    assert abs(z.mean()) < 0.03 and abs(z.std() - 1) < 0.03 and abs((z**3).mean()) < 0.1
    low, high = SIGMA_RANGE
    assert (sigma >= low).all() and (sigma <= high).all()


@pytest.mark.parametrize("K, S", [(1, 1), (4, 4), (6, 3), (8, 2)])
def test_log_prob_is_the_sum_over_the_drawing_loop(K, S):
    """Step by step from the start by plain rules, also against the states that draw recorded."""
    network, problems = lively(), batch(np.random.default_rng(9), 3, K, S, 10, 4)
    f, e, plans, divisions, log_share = drawn(network, problems, 32, 3)
    total = torch.zeros(3, 32)
    for t in range(K):
        recorded = network.logits(f, e, State(*(part.unflatten(1, (32, K))[:, :, t] for part in plans.states)))
        logits = network.logits(f, e, state_after(plans.actions[:, :, :t], K))
        torch.testing.assert_close(recorded.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
        action = plans.actions[:, :, t]
        step = logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
        assert torch.isfinite(step).all()
        total = total + step
    torch.testing.assert_close(network.log_prob(f, e, plans), total, atol=1e-3, rtol=1e-4)
    for r in range(3):
        density = torch.distributions.Normal(*divisions).log_prob(log_share[:, :, r]).sum(-1)
        torch.testing.assert_close(divisions.log_prob(log_share)[:, :, r], density, atol=1e-3, rtol=1e-4)
    assert torch.equal(members(plans).sum((-2, -1)), (plans.actions < 2 * K).sum(-1).float())


def test_greedy_takes_the_likeliest_grouping_and_division():
    """Number 0 of the groupings by the likeliest action throughout, number 0 of every grouping's divisions the mean."""
    network, problems = lively(1), batch(np.random.default_rng(10), 6, 7, 4, 10, 4)
    f, e, plans, divisions, log_share = drawn(network, problems, 3, 2, greedy=True)
    for t in range(7):
        logits = network.logits(f, e, state_after(plans.actions[:, :1, :t], 7))
        assert torch.equal(plans.actions[:, :1, t], logits.argmax(-1))
    assert torch.equal(log_share[:, :, 0], divisions.mean) and not torch.equal(log_share[:, :, 1], divisions.mean)


def test_draws_follow_from_the_generator():
    network, problems = lively(), batch(np.random.default_rng(11), 2, 6, 3, 10, 4)
    one, again, other = (drawn(network, problems, 20, 2, seed) for seed in (5, 5, 6))
    assert torch.equal(one.groupings.actions, again.groupings.actions) and torch.equal(one.log_share, again.log_share)
    assert not torch.equal(one.groupings.actions, other.groupings.actions)
    assert not torch.equal(one.log_share, other.log_share)
    assert len({tuple(row) for row in one.groupings.actions[0].tolist()}) > 1


def same_features(one, other):
    return all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1]))


def test_the_network_sees_everything_it_should():
    """Each part of the problem reaches the features; only what lies beyond ratios (one unit for all) does not."""
    problem = random_problem(np.random.default_rng(12), K=4, L=6, S=3, M=5, schedule="1f1b", transfers="blocking",
                             memory=1.0)
    seen = features(Batch.of([problem]))
    for change in (
            *({name: getattr(problem, name) * np.linspace(1, 2, getattr(problem, name).size).reshape(
                getattr(problem, name).shape)} for name in SHAPES if name != "bandwidth_bytes_per_s"),
            {"bandwidth_bytes_per_s": problem.bandwidth_bytes_per_s.T}, {"stages": 2}, {"micro_batches": 6},
            {"schedule": "gpipe"}, {"transfers": "overlapped"}):
        other = features(Batch.of([problem.replace(**change)]))
        assert other.stages != seen.stages or not same_features(seen, other), change


def test_a_network_blind_to_links_does_not_see_them():
    rng = np.random.default_rng(13)
    problem = random_problem(rng, K=5, L=6, S=3, M=5, memory=1.0)
    other = problem.replace(bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s * rng.uniform(0.1, 10, (5, 5)),
                            latency_s=problem.latency_s.T * 3)
    hidden, open_ = lively(blind="links"), lively()
    pair = Batch.of([problem]), Batch.of([other])
    assert same_features(*map(hidden.features, pair)) and not same_features(*map(open_.features, pair))
    slower = Batch.of([problem.replace(forward_s=problem.forward_s * np.linspace(1, 3, 5))])
    assert not same_features(hidden.features(pair[0]), hidden.features(slower))


@pytest.mark.parametrize("blind, change", [
    ("memory", lambda p: {"memory_bytes": p.memory_bytes * np.linspace(0.5, 3, 5)}),
    ("micro-batches", lambda p: {"micro_batches": 40}), ("stages", lambda p: {"stages": 2})])
def test_a_network_does_not_see_what_is_hidden(blind, change):
    """How many stages there are decoding always knows: hidden from the encoder's part of the features."""
    problem = random_problem(np.random.default_rng(15), K=5, L=6, S=3, M=5, memory=1.0)
    pair = Batch.of([problem]), Batch.of([problem.replace(**change(problem))])
    encoded = lambda f: f._replace(stages=0, in_flight=torch.zeros(1))
    hidden, open_ = lively(blind=blind), lively()
    assert same_features(*(encoded(hidden.features(p)) for p in pair))
    assert not same_features(*(encoded(open_.features(p)) for p in pair))
    slower = Batch.of([problem.replace(forward_s=problem.forward_s * np.linspace(1, 3, 5))])
    assert not same_features(hidden.features(pair[0]), hidden.features(slower))
    assert hidden.features(pair[1]).stages == pair[1].stages == hidden.features(pair[1]).in_flight.shape[1]


def uniform_problem(rng, K, L, memory):
    """Layers all alike (no two devices are), so that features stated for the whole model are exact."""
    problem = random_problem(rng, K=K, L=L, S=K, M=5, memory=memory, schedule="1f1b")
    alike = {name: np.repeat(getattr(problem, name)[:1], L, axis=0) for name in (
        "forward_s", "backward_s", "output_bytes", "stash_bytes", "static_bytes", "gradient_bytes")}
    return problem.replace(**alike)


def stage_columns(d):
    """[N, S, STAGE_FEATURES] of the groupings of one problem."""
    f = d.f
    parts = (part.numpy() for part in (f.speed, f.link, f.link_reduce, f.capacity, f.in_flight, f.outputs))
    return torch.from_numpy(readings.read_all_stages(d.groupings.order, d.groupings.starts, *parts)[2][0])


def test_stage_features_state_the_transfers_of_the_cost_model():
    """Columns 7, 8: transfers over the boundary ahead, both ways, over the balanced stage time; one device a stage."""
    rng = np.random.default_rng(15)
    problem = uniform_problem(rng, 5, 10, None)
    d = drawn(lively(), Batch.of([problem]), 8)
    columns = stage_columns(d)
    balanced = 1 / (1 / (problem.forward_s + problem.backward_s).sum(0)).sum()
    for n, (strategy,) in enumerate(strategies(Batch.of([problem]), d)[0]):
        slow = slow_stages(problem, strategy)
        for column, c in ((7, slow.forward_c), (8, slow.backward_c)):
            expected = torch.tensor([*(math.log1p(20 * x / balanced) / 3 for x in c), 0.0])
            torch.testing.assert_close(columns[n, :, column], expected, atol=1e-4, rtol=1e-4)


def test_stage_features_state_whether_the_memory_suffices():
    """Column 14: over memory when the stage takes work in proportion to its speed. Equal devices, one layer each."""
    rng = np.random.default_rng(16)
    flags = []
    for _ in range(10):
        problem = uniform_problem(rng, 5, 5, 1.0)
        problem = problem.replace(forward_s=np.ones((5, 5)), backward_s=np.ones((5, 5)))
        d = drawn(lively(), Batch.of([problem]), 4)
        columns, member = stage_columns(d), members(d.groupings)
        for n in range(4):
            groups = [tuple(member[0, n, s].nonzero()[:, 0].tolist()) for s in range(5)]
            need = slow_memory(problem, Strategy((1, 2, 3, 4), groups))
            for s, (k,) in enumerate(groups):
                flags.append(need[k] > problem.memory_bytes[k])
                assert bool(columns[n, s, 14]) == flags[-1]
    assert 20 < sum(flags) < len(flags) - 20


def test_virtual_instances_feed_the_network_without_surprises():
    """Features of the training distribution keep to a range that a network can read."""
    rng = np.random.default_rng(17)
    for _ in range(30):
        f = features(virtual.draw(rng, 8, **virtual.sizes(rng)))
        assert all(part.abs().max() < 12 for part in (f.globals, f.devices, f.pairs))


def test_the_network_knows_how_much_is_sent_at_each_cut():
    """Places against the nearest cut by plain search; stage features 16 to 18 and state features 9, 10 read them."""
    rng = np.random.default_rng(18)
    problem = random_problem(rng, K=5, L=9, S=3, M=5).replace(output_bytes=np.geomspace(5e6, 1e3, 9))
    d = drawn(lively(), Batch.of([problem]), 8)
    work = ((problem.forward_s + problem.backward_s) / (problem.forward_s + problem.backward_s).sum(0)).mean(1)
    cuts, log_output = work.cumsum()[:-1], np.log(problem.output_bytes[:-1] / problem.output_bytes[:-1].mean())

    def at(part):
        part = round(min(max(part, 0.0), 1.0) * PLACES) / PLACES
        return max(log_output[np.abs(cuts - part).argmin()], -5.0)

    np.testing.assert_allclose(d.f.outputs[0], [at(i / PLACES) for i in range(PLACES + 1)], rtol=1e-4)
    columns, member, speed = stage_columns(d), members(d.groupings)[0].numpy(), d.f.speed[0].double().numpy()
    for n in range(8):
        share = member[n] @ speed
        ends = share.cumsum() / share.sum()
        for s in range(2):
            ahead = [at(ends[s]), at(ends[s] + 1 / 6) - at(ends[s] - 1 / 6)]
            np.testing.assert_allclose(columns[n, s, [16, 18]], np.multiply(0.5, ahead), atol=1e-5)
            assert columns[n, s + 1, 17] == columns[n, s, 16]
        assert columns[n, 2, 16] == columns[n, 2, 18] == columns[n, 0, 17] == 0
    used = np.array([[[True, False, True, False, False]]])
    group = np.array([[[False, False, True, False, False]]])
    values = readings.read_states(used, group, np.array([[2]]), 3, d.f.speed.numpy(), d.f.outputs.numpy())[0, 0]
    free = 1 - speed[0] - speed[2]
    np.testing.assert_allclose(values[9:], [0.5 * at(1 - free), 0.5 * at(1.0)], atol=1e-5)


def test_joining_sees_the_links_from_the_group_before():
    """Two partial strategies that differ in nothing but the devices of the stage before the open one."""
    network = lively()
    f, e, *_ = drawn(network, Batch.of([random_problem(np.random.default_rng(19), K=6, L=9, S=3, M=5)]), 1)
    one = state_after(torch.tensor([[[0, 6 + 1, 2]]]), 6)
    two = one._replace(before=one.before.roll(1, -1))
    here, there = (network.logits(f, e, state)[0, 0] for state in (one, two))
    allowed = torch.isfinite(here)
    joins = torch.arange(13) // 6 == 1
    assert (allowed & joins).any() and not torch.allclose(here[allowed & joins], there[allowed & joins])
    assert torch.equal(here[allowed & ~joins], there[allowed & ~joins])


def test_logits_that_are_no_numbers_are_an_error():
    network = lively()
    with torch.no_grad():
        network.query[3].bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="no numbers"):
        drawn(network, batch(np.random.default_rng(20), 1, 4, 2, 6, 4), 2)
