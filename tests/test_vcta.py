"""VCTA: how a step contrasts what was drawn, training that learns, resumes and runs in two processes."""

import csv
import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import TINY, drawn, lively, strategies
from torch import distributed

from nnpiper import checkpoint, cost, vcta, virtual
from nnpiper.batch import assemble, disassemble
from nnpiper.losses import LOSSES
from nnpiper.network import Divisions, Network, Size, join
from nnpiper.paths import CHECKPOINT
from nnpiper.problem import InputError
from nnpiper.search import device_speed
from nnpiper.simulator import step_time
from nnpiper.vcta import Recipe

RECIPE = Recipe(steps=4, seed=1, instances=4, groupings=4, divisions=3, size=TINY)


@pytest.fixture
def cheap_validation(monkeypatch):
    monkeypatch.setattr(vcta, "Validation", functools.partial(vcta.Validation, instances=3, moves=500))


def weights(path) -> dict:
    return torch.load(path, weights_only=True)


def log_rows(folder) -> list[dict]:
    """The log without the minutes."""
    rows = csv.DictReader((folder / "log.csv").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "minutes"} for row in rows]


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_score_is_the_exact_step_of_what_was_drawn():
    problems = virtual.draw(np.random.default_rng(3), 3, 7, 3, 20, 6, "1f1b", "blocking")
    d = drawn(lively(), problems, 5, 3)
    step_s, overflow = vcta.score(problems, d.groupings, d.log_share)
    assert step_s.shape == overflow.shape == (3, 5, 3)
    for a, row in enumerate(strategies(problems, d)):
        for n, divisions in enumerate(row):
            for r, strategy in enumerate(divisions):
                assert step_s[a, n, r] == pytest.approx(step_time(problems.problem(a), strategy), rel=1e-12)
                assert overflow[a, n, r] == pytest.approx(cost.overflow_bytes(problems.problem(a), strategy), rel=1e-9)


def test_a_growing_contrast_draws_more_groupings_late():
    grows = Recipe(steps=10, groupings=3)
    assert [grows.groupings_at(step) for step in range(10)] == [3] * 5 + [6] * 3 + [12] * 2
    assert [replace(grows, grows=False).groupings_at(step) for step in (0, 9)] == [3, 3]
    seen = []
    network = Network(TINY)
    draw = network.draw
    network.draw = lambda f, encoding, N, generator: seen.append(N) or draw(f, encoding, N, generator)
    for step in range(4):
        vcta.contrast_step(network, RECIPE, step)
    assert seen == [4, 4, 8, 8]


@pytest.mark.parametrize("loss_name", ["pairwise", "best-against-spread", "self-labelling", "policy-gradient"])
def test_a_step_contrasts_groupings_by_their_best_division_and_divisions_within_a_grouping(monkeypatch, loss_name):
    """The same outcomes and log probabilities, put together plainly; of seven groupings best-against-spread reads five."""
    recipe, network, kept = replace(RECIPE, loss=loss_name, groupings=7, grows=False), lively(), {}

    def keep(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: kept.setdefault(owner, function(*a)))

    keep(vcta, "score")
    keep(network, "log_prob")
    keep(Divisions, "log_prob")
    loss = vcta.contrast_step(network, recipe, 0)
    (step_s, overflow), grouping_p, division_p = kept[vcta], kept[network], kept[Divisions]
    best = np.array([[min(zip(o, t)) for o, t in zip(*rows)] for rows in zip(overflow.tolist(), step_s.tolist())])
    read = np.tile(np.arange(7), (len(best), 1))
    if loss_name == "best-against-spread":
        ranked = [sorted(range(7), key=lambda n: tuple(row[n])) for row in best]
        read = np.array(ranked)[:, [0, 1, 3, 4, 6]]
    rows = np.arange(len(best))[:, None]
    levels = [(grouping_p, *best[rows, read].transpose(2, 0, 1)[::-1]),
              (division_p.reshape(-1, 3), *(part[rows, read].reshape(-1, 3) for part in (step_s, overflow)))]
    expected = sum(LOSSES[loss_name](*level).item() for level in levels)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_groupings_that_the_contrast_does_not_read_change_no_gradient_of_the_pointer(monkeypatch):
    """With a gradient for all groupings and for those that are read alone; the divider's differs, which learns from the
    divisions of the latter alone."""
    monkeypatch.setitem(LOSSES, "all", LOSSES["best-against-spread"])
    found = []
    for name in ("best-against-spread", "all"):
        network = lively()
        vcta.contrast_step(network, Recipe(steps=9, seed=1, instances=4, groupings=9, loss=name), 0).backward()
        found.append({name: p.grad for name, p in network.named_parameters() if not name.startswith("divider")})
    assert all(torch.allclose(part, found[1][name], atol=1e-6) for name, part in found[0].items())
    assert sum(part.abs().sum() for part in found[0].values()) > 0.1


def test_virtual_instances_are_problems_within_their_ranges():
    rng, ranges, seen = np.random.default_rng(4), virtual.Ranges(), []
    for _ in range(150):
        size = virtual.sizes(rng)
        K, S, L, M = (size[letter] for letter in "KSLM")
        assert ranges.devices[0] <= K <= ranges.devices[1] and 2 <= S <= K and S <= L <= ranges.layers_most
        assert ranges.micro_batches[0] <= M <= ranges.micro_batches[1]
        problems = virtual.draw(rng, 2, **size)
        for a in range(2):
            problem = problems.problem(a)  # checks every field
            assert (problem.devices, problem.stages, problem.layers, problem.micro_batches) == (K, S, L, M)
            link_s = problem.latency_s + problem.output_bytes.mean() / problem.bandwidth_bytes_per_s
            balanced_s = 1 / (1 / (problem.forward_s + problem.backward_s).sum(0)).sum()
            assert 1e-6 < np.median(link_s[~np.eye(K, dtype=bool)]) / balanced_s < 100
        seen.append((K == S, size["schedule"], size["transfers"]))
    assert len(set(seen)) == 8  # every combination


def test_virtual_outputs_are_equal_varied_or_change_along_the_layers():
    output = virtual.draw(np.random.default_rng(5), 2000, 4, 2, 50, 4, "1f1b", "blocking").output_bytes
    np.testing.assert_allclose(output.mean(1), 1e6)
    log_output = np.log(output)
    trend = log_output @ np.linspace(-1, 1, 50) / (np.linspace(-1, 1, 50) ** 2).sum()
    equal, falls, rises = np.ptp(log_output, axis=1) < 1e-9, trend < -0.5, trend > 0.5
    assert 0.4 < equal.mean() < 0.6 and 0.15 < falls.mean() < 0.3 and 0.01 < rises.mean() < 0.1
    assert 0.1 < (~equal & ~falls & ~rises).mean() < 0.3 and trend.min() < -2.5


def test_virtual_instances_follow_from_the_generator():
    one, again, other = (virtual.draw(np.random.default_rng(seed), 2, 5, 3, 9, 4, "gpipe", "overlapped")
                         for seed in (5, 5, 6))
    assert one.problem(1).to_json() == again.problem(1).to_json() != other.problem(1).to_json()
    assert one.problem(0).to_json() != one.problem(1).to_json()


def test_training_steps_draw_fresh_instances_and_the_validation_others(monkeypatch):
    states, draw = [], virtual.draw

    def noted(rng, *arguments, **more):
        states.append(rng.bit_generator.state["state"]["state"])
        return draw(rng, *arguments, **more)

    monkeypatch.setattr(virtual, "draw", noted)
    network = Network(TINY)
    for step in range(3):
        for rank in range(2):
            vcta.contrast_step(network, RECIPE, step, rank, 2)
    vcta.Validation(RECIPE.seed, instances=1, moves=10)
    assert len(states) == len(set(states)) == 6 + 4
    vcta.contrast_step(network, RECIPE, 0, 0, 2)
    assert states[-1] == states[0]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "imitation"])
def test_training_improves_the_samples(monkeypatch, loss):
    """One size, 120 steps: on instances never trained on, the mean of 16 x 2 samples gets better and, by the contrasts
    that weigh the leaders, the best of them, too."""
    size = dict(K=6, S=6, L=30, M=8, schedule="1f1b", transfers="blocking")
    monkeypatch.setattr(virtual, "sizes", lambda rng: size)
    recipe = Recipe(instances=16, groupings=8, divisions=4, size=TINY, loss=loss)
    torch.manual_seed(0)
    network = Network(TINY)
    held_out = virtual.draw(np.random.default_rng(6), 40, **size)

    def steps_s():
        d = drawn(network, held_out, 16, 2)
        return vcta.score(held_out, d.groupings, d.log_share)[0].reshape(40, 32)

    before = steps_s()
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for step in range(120):
        optimizer.zero_grad()
        vcta.contrast_step(network, recipe, step).backward()
        optimizer.step()
    after = steps_s()
    assert (after.mean(1) / before.mean(1)).mean() < 0.97
    if loss in ("best-against-spread", "pairwise"):
        assert (after.min(1) / before.min(1)).mean() < 0.995


def test_imitation_makes_annealed_plans_likelier(monkeypatch):
    """One size, 60 steps: the plans of instances never trained on."""
    size = dict(K=6, S=3, L=30, M=8, schedule="1f1b", transfers="blocking")
    monkeypatch.setattr(virtual, "sizes", lambda rng: size)
    recipe = Recipe(instances=16, size=TINY, loss="imitation", polish=500)
    torch.manual_seed(0)
    network = Network(TINY)
    held_out = lambda: vcta.contrast_step(network, replace(recipe, seed=1), 0).item()
    before = held_out()
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for step in range(60):
        optimizer.zero_grad()
        vcta.contrast_step(network, recipe, step).backward()
        optimizer.step()
    assert held_out() < before - 1.0  # e times as likely


def killed_at(stop):
    """The training step, which is killed where its number is stop()."""
    contrast_step = vcta.contrast_step

    def killed(network, recipe, step, *more):
        if step == stop():
            raise KeyboardInterrupt
        return contrast_step(network, recipe, step, *more)

    return killed


def test_a_resumed_run_equals_the_unbroken_one(tmp_path, monkeypatch, cheap_validation):
    """Killed in its third step, after its last state was written in the second; weights equal to the last bit."""
    minutes = iter(range(0, 10**9, 60))
    monkeypatch.setattr(vcta.time, "perf_counter", lambda: float(next(minutes)))  # a state is written after every step
    whole = weights(vcta.train(tmp_path / "whole", RECIPE, progress=False))
    contrast_step = vcta.contrast_step
    broken = tmp_path / "broken"
    monkeypatch.setattr(vcta, "contrast_step", killed_at(lambda: 2))
    with pytest.raises(KeyboardInterrupt):
        vcta.train(broken, RECIPE, progress=False)
    assert sorted(os.listdir(broken)) == ["log.csv", "resume.pt"]
    taken = []
    monkeypatch.setattr(vcta, "contrast_step", lambda *a: (taken.append(a[2]), contrast_step(*a))[1])
    assert equal(weights(vcta.train(broken, RECIPE, progress=False)), whole)
    assert taken == [2, 3]
    assert log_rows(broken) == log_rows(tmp_path / "whole")
    assert [row["step"] for row in log_rows(broken)] == ["1", "2", "3", "4"]
    assert equal(weights(vcta.train(broken, RECIPE, progress=False)), whole) and taken == [2, 3]  # nothing left to do
    assert not equal(whole, weights(vcta.train(tmp_path / "other", replace(RECIPE, seed=2), progress=False)))


def test_losses_between_two_log_rows_survive_a_kill(tmp_path, monkeypatch, cheap_validation):
    """A row's loss is the mean over all its steps, also over those before the run was broken off."""
    recipe = replace(RECIPE, steps=80)  # a row every second step
    minutes = iter(range(0, 10**9, 60))
    monkeypatch.setattr(vcta.time, "perf_counter", lambda: float(next(minutes)))
    monkeypatch.setattr(vcta, "contrast_step", killed_at(lambda: stop))
    losses = {}
    for folder, stops in (("whole", [4]), ("broken", [3, 4])):
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                vcta.train(tmp_path / folder, recipe, progress=False)
        losses[folder] = [row["loss"] for row in log_rows(tmp_path / folder)]
    assert len(losses["whole"]) == 2 and losses["whole"] == losses["broken"]


def test_another_recipe_is_refused(tmp_path, cheap_validation):
    vcta.train(tmp_path, RECIPE, progress=False)
    for change in (dict(seed=2), dict(steps=5), dict(loss="self-labelling"), dict(blind="links")):
        with pytest.raises(InputError, match="resume.pt: recipe .*; allowed: ") as caught:
            vcta.train(tmp_path, replace(RECIPE, **change), progress=False)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04" + 100 * b"0"])
def test_a_broken_state_is_refused_with_one_line(tmp_path, data):
    (tmp_path / "resume.pt").write_bytes(data)
    with pytest.raises(InputError, match="resume.pt: cannot be read: .+; allowed") as caught:
        vcta.train(tmp_path, RECIPE, progress=False)
    assert "\n" not in str(caught.value) and [path.name for path in tmp_path.iterdir()] == ["resume.pt"]


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(vcta, "contrast_step", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        vcta.train(tmp_path / "file" / "run", RECIPE, progress=False)


def test_unknown_choices_are_refused():
    with pytest.raises(InputError, match="loss: 'ranks'; allowed: best-against-spread, "):
        Recipe(loss="ranks")
    with pytest.raises(InputError, match="blind: 'link'; allowed"):
        Network(TINY, "link")


@pytest.mark.parametrize("steps", [1, 2, 20, 21])
def test_every_number_of_steps_can_be_trained(tmp_path, monkeypatch, cheap_validation, steps):
    """OneCycleLR divides by zero where its warm-up is exactly one step."""
    network = Network(TINY)
    monkeypatch.setattr(vcta, "contrast_step", lambda network, *more: 0 * network.nothing_yet.sum())
    monkeypatch.setattr(vcta.Validation.func, "gaps", lambda self, network: [0.0] * 4)
    vcta.train(tmp_path, replace(RECIPE, steps=steps), progress=False)
    card = json.loads((tmp_path / "nnpiper.json").read_text())
    assert card["recipe"]["steps"] == steps and network.size == TINY


def test_what_training_writes(tmp_path, cheap_validation):
    path = vcta.train(tmp_path, RECIPE, progress=False)
    assert sorted(os.listdir(tmp_path)) == ["log.csv", "nnpiper.json", "nnpiper.pt", "resume.pt"]
    card = json.loads(checkpoint.card_path(path).read_text())
    assert card["recipe"]["seed"] == 1 and card["processes"] == 1 and card["size"] == {
        "width": 16, "heads": 2, "depth": 1, "stage_width": 8, "stage_heads": 2, "stage_depth": 1}
    assert {"command", "minutes", "torch", "numpy", "python", "processor", "threads", "sha256"} <= set(card)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == vcta.LOG_FIELDS and all(math.isfinite(float(value)) for row in rows[1:] for value in row)
    assert equal(checkpoint.load(path).state_dict(), weights(path))


def test_validation_measures_the_gap_to_its_reference():
    """With the reference set to the network's own steps the gaps are what they must be."""
    validation, network = vcta.Validation(7, instances=3, moves=200), lively()
    assert vcta.Validation(7, instances=3, moves=200).gaps(network) == validation.gaps(network)
    greedy, best = [], []
    for number, (problems, reference) in enumerate(validation.sets):
        assert (np.isinf(reference) | (reference > 0)).all()
        d = drawn(network, problems, 32, 4, greedy=True)
        step_s, overflow = (a.reshape(3, 128) for a in vcta.score(problems, d.groupings, d.log_share))
        usable = np.where(overflow > 0, 2 * step_s.max(1, keepdims=True), step_s)
        validation.sets[number] = problems, usable.min(1) / 1.25
        greedy.append(1.25 * usable[:, 0] / usable.min(1))
    expected = [np.mean(greedy[:2]) - 1, 0.25, np.mean(greedy[2:]) - 1, 0.25]
    assert validation.gaps(network) == pytest.approx(expected)


def test_two_processes_train_one_network(tmp_path):
    """torchrun over gloo: both end with the same weights, and these are what averaged gradients give."""
    tests = Path(__file__).parent
    steps = 3
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
         str(tests / "train_worker.py"), str(tmp_path), str(steps)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = weights(tmp_path / "rank0.pt"), weights(tmp_path / "rank1.pt")
    assert equal(one, other) and equal(one, weights(tmp_path / "nnpiper.pt"))
    assert json.loads((tmp_path / "nnpiper.json").read_text())["processes"] == 2

    recipe = replace(RECIPE, steps=steps)
    torch.manual_seed(recipe.seed)
    network = Network(TINY)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(vcta.contrast_step(network, recipe, step, rank, 2) for rank in range(2)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        rate.step()
    for name, weight in network.state_dict().items():
        torch.testing.assert_close(one[name], weight, atol=1e-5, rtol=1e-3)
    assert not distributed.is_initialized()


def test_polished_plans_are_better_and_are_scored_as_they_are():
    """The polished plan of each instance joins as its last grouping, with its own division first: it scores exactly as
    the search left it, and never worse than the best drawn plan up to the rounding of its shares."""
    network, rng = lively(), np.random.default_rng(2)
    problems = virtual.draw(rng, 6, K=6, S=3, L=24, M=8, schedule="1f1b", transfers="blocking")
    d = drawn(network, problems, 8, 3)
    step_s, overflow = vcta.score(problems, d.groupings, d.log_share)
    actions, share = vcta.polished(problems, d.groupings, d.log_share, step_s, overflow, 400, rng)
    again = network.replay(d.f, actions)
    assert torch.equal(again.actions[:, 0], torch.from_numpy(actions))
    after, over = problems.step_times(*problems.strategies(actions[:, None], share[:, None, None]))
    best = np.array([min(zip(o.ravel(), t.ravel())) for o, t in zip(overflow, step_s)])
    better = [(o, t) <= (bo, bt * 1.02) for o, t, (bo, bt) in zip(over[:, 0], after[:, 0], best)]
    assert all(better) and (after[:, 0] / best[:, 1]).mean() < 0.99
    divisions = network.divide(d.f, d.e, again)
    around = divisions.around(share, 3, torch.Generator().manual_seed(0))
    assert around.shape == (6, 1, 3, 3)
    assert around[:, 0, 0].softmax(-1).numpy() == pytest.approx(share, rel=1e-4)
    shifted = Divisions(divisions.mean, divisions.sigma)
    given = shifted.log_prob(around)[:, 0, 0]
    for shift in (-0.1, 0.1):  # of all equally wide log shares the likeliest
        assert (shifted.log_prob(around + shift)[:, 0, 0] < given).all()


def test_replayed_groupings_have_the_states_they_were_drawn_through():
    network = lively()
    problems = virtual.draw(np.random.default_rng(4), 5, K=7, S=3, L=20, M=4, schedule="gpipe", transfers="blocking")
    d = drawn(network, problems, 1, 1)
    again = network.replay(d.f, d.groupings.actions[:, 0].numpy())
    assert all(torch.equal(one, other) for one, other in zip(again.states, d.groupings.states))
    assert (again.order == d.groupings.order).all() and (again.starts == d.groupings.starts).all()
    joined = join(d.groupings, again)
    log_p = network.log_prob(d.f, d.e, joined)
    assert torch.allclose(log_p[:, 0], log_p[:, 1]) and log_p.shape == (5, 2)


def test_disassembling_a_strategy_undoes_assembling():
    network = lively()
    problems = virtual.draw(np.random.default_rng(5), 4, K=8, S=3, L=20, M=4, schedule="1f1b", transfers="overlapped")
    actions = drawn(network, problems, 6, 1).groupings.actions.numpy()
    order, starts = assemble(actions, 3)
    speed = device_speed(problems.forward_s + problems.backward_s)
    for a in range(4):
        for n in range(6):
            assert disassemble(order[a, n], starts[a, n], speed[a]).tolist() == actions[a, n].tolist()


def test_training_goes_on_from_a_checkpoint(tmp_path, cheap_validation):
    first = vcta.train(tmp_path / "first", replace(RECIPE, steps=1), progress=False)
    recipe = replace(RECIPE, steps=1, start=str(first), learning_rate=1e-9)
    second = vcta.train(tmp_path / "second", recipe, progress=False)
    before, after = weights(first), weights(second)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    card = json.loads(checkpoint.card_path(second).read_text())
    assert card["start"]["sha256"] == json.loads(checkpoint.card_path(first).read_text())["sha256"]
    with pytest.raises(InputError, match="missing.pt"):
        vcta.train(tmp_path / "third", replace(RECIPE, start=str(tmp_path / "missing.pt")), progress=False)


def test_polish_in_training_counts_the_polished_plans(monkeypatch):
    """Each instance has one grouping more in the contrast, and the loss has a gradient."""
    seen = []
    monkeypatch.setitem(LOSSES, RECIPE.loss, lambda p, *rest: seen.append(p.shape) or p.sum())
    network = Network(TINY)
    vcta.contrast_step(network, replace(RECIPE, polish=50), 0).backward()
    A = round(RECIPE.instances * min(1.0, 16 / virtual.sizes(np.random.default_rng([RECIPE.seed, 0]))["K"]) ** 1.5)
    assert seen == [(A, RECIPE.groupings + 1), (A * (RECIPE.groupings + 1), RECIPE.divisions)]


@pytest.mark.parametrize("folder", sorted(path.parent for path in CHECKPOINT.parent.rglob("nnpiper.pt")),
                         ids=lambda folder: folder.name)
def test_a_shipped_card_has_the_command_and_the_steps_of_its_log(folder):
    card = json.loads((folder / "nnpiper.json").read_text())
    recipe = Recipe(**{**card["recipe"], "size": Size(**card["recipe"]["size"])})
    assert card["command"] == vcta.command(recipe, card["processes"]) and "start" not in card
    log = np.genfromtxt(folder / "log.csv", delimiter=",", skip_header=1)
    assert log[-1, 0] == recipe.steps and (np.diff(log[:, :2], axis=0) > 0).all()


def test_the_shipped_checkpoint_is_of_the_recipe():
    card = json.loads(checkpoint.card_path(CHECKPOINT).read_text())
    assert card["recipe"] == asdict(Recipe(seed=card["recipe"]["seed"]))
