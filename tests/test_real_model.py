"""A small GPT split over three processes by the real engine: loss and gradients of the unsplit model, the order of the
operations, how a device slows them down; the problem, the plans and the table against sums by hand."""

import dataclasses
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest

from nnpiper import schedule
from nnpiper.cost import StageArrays
from nnpiper.engine import real_model
from nnpiper.simulator import simulate, step_time
from nnpiper.workload import MODELS

SMALL = dataclasses.replace(MODELS["gpt2"], layers=3, hidden=32, heads=2, kv_heads=2, feed_forward=128, vocabulary=61)
COUNTS, SLOWNESS, M = [2, 2, 1], [2.0, 3.0, 2.5], 4
PROFILE = [[0.01, 0.02], *[[0.1, 0.2]] * 3, [0.3, 0.6]]


@pytest.fixture(scope="module")
def answers():
    """What the ranks answer about the unsplit model and about two steps of each schedule."""
    with real_model.Processes(SMALL, 8) as ask:
        job = dict(counts=COUNTS, slowness=SLOWNESS, micro_batches=M, steps=2)
        return {"whole": ask("whole", micro_batches=M)[0], "profile": ask("profile", slowness=1.5, repeats=2),
                "probe": ask("probe", repeats=3),
                **{name: ask("run", schedule=name, **job) for name in ("1f1b", "gpipe")}}


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_loss_and_gradients_are_those_of_the_unsplit_model(answers, name):
    whole, ranks = answers["whole"], answers[name]
    assert len(set(np.round(whole["losses"], 6))) == M  # micro-batches differ, else their order would not matter
    for losses in ranks[-1]["losses"]:  # of both steps: the dropout of a micro-batch comes again
        assert losses == pytest.approx(whole["losses"], rel=1e-5)
    split = [pair for rank in ranks for pair in rank["gradients"]]
    assert len(split) == len(whole["gradients"]) == 2 + 3 * 16 + 3  # parameters: embedding, blocks, head
    assert min(norm for _, norm in whole["gradients"][:2]) > 1e-3
    np.testing.assert_allclose(split, whole["gradients"], rtol=1e-5, atol=1e-5)


def test_dropout_is_on(answers):
    """The losses are not those of the same layers without it."""
    import torch
    from nnpiper.engine import real_stage
    kinds = ("embedding", "block", "block", "block", "head")
    module = real_stage.Stage(SMALL, kinds, 0, M).eval()
    tokens, targets = (part[:1] for part in real_stage.batch(SMALL, 8, M))
    with torch.no_grad():
        for number, layer in enumerate(module.layers):  # the attention's own dropout stays, with other numbers
            torch.manual_seed(7)
            tokens = layer(tokens, targets) if number == 4 else layer(tokens)
    assert abs(tokens.item() / answers["whole"]["losses"][0] - 1) > 1e-4


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_order_and_slowness_of_the_operations(answers, name):
    order = schedule.stage_order(name, 3, M)
    for s, rank in enumerate(answers[name]):
        for operations in rank["operations"]:
            assert [(kind, m) for kind, m, *_ in operations] == [("FB"[kind], m) for kind, m in order[s].tolist()]
            for _, _, begin, end, work_s, late_s in operations:
                assert work_s > 0 and end - begin >= SLOWNESS[s] * work_s + late_s - 1e-9


def test_profile_and_probe_have_what_is_asked(answers):
    assert answers["profile"][1:] == [None, None]
    assert np.shape(answers["profile"][0]) == (5, 2) and np.min(answers["profile"][0]) > 0
    assert [len(times) for times in answers["probe"][0]] == [3, 3] and min(answers["probe"][0][1]) > 0


def test_a_stage_that_dies_is_reported():
    with real_model.Processes(SMALL, 8) as ask:
        ask.started[1].kill()
        with pytest.raises(RuntimeError, match="stage [012] ended with exit code"):
            ask("run", counts=COUNTS, slowness=SLOWNESS, micro_batches=M, schedule="1f1b", steps=1)
        started = ask.started
    assert all(process.returncode is not None for process in started)


def by_hand(name):
    return real_model.problem(SMALL, 8, M, name, PROFILE, 1e-3, 1e6, slowness=(2.0, 1.0, 4.0))


def test_problem_by_hand():
    asked = by_hand("gpipe")
    assert asked.forward_s.tolist() == [[0.02, 0.01, 0.04], *[pytest.approx([0.2, 0.1, 0.4])] * 3, [0.6, 0.3, 1.2]]
    assert asked.backward_s.tolist() == (2 * asked.forward_s).tolist()
    assert asked.output_bytes.tolist() == [8 * 32 * 4] * 4 + [0]
    assert (asked.stages, asked.micro_batches, asked.schedule, asked.transfers) == (3, M, "gpipe", "blocking")


def test_plans():
    asked = by_hand("1f1b")
    plans = real_model.plans(asked)
    best, swapped, even = plans["NNPiper"], plans["swapped"], plans["even"]
    for plan in plans.values():
        plan.check(asked)
    assert even.cuts == (2, 4) and even.groups == ((0,), (1,), (2,))
    assert swapped.cuts == best.cuts
    # device 1 is the fastest, 2 the slowest
    assert [{1: 2, 2: 1}.get(k, k) for k, in best.groups] == [k for k, in swapped.groups]
    assert step_time(asked, best) <= min(step_time(asked, even), step_time(asked, swapped))


def test_link_fits_both_messages():
    latency_s, bandwidth = real_model.link(lambda do, repeats: [[[0.003, 0.002, 0.002], [0.004, 0.005, 0.004]]], 2004)
    assert latency_s == 0.002 and bandwidth == pytest.approx(2000 / 0.002)


def test_summary_by_hand():
    """Rows of one plan whose stages took twice as long as predicted: the simulator alone is right."""
    asked = by_hand("1f1b")
    plan = real_model.plans(asked)["even"]
    F, B = np.array([0.44, 0.4, 2.4]), np.array([0.88, 0.8, 4.8])  # of the stages, twice what the profile says
    send = 1e-3 + 1024 / 1e6
    whole = simulate(StageArrays(F, B, np.full(2, send), np.full(2, send), np.zeros(3)), "1f1b", M, "blocking")
    answers = []
    for s in range(3):
        step = [["F", 0, 0.0, F[s], 0.1, 0.01], ["B", 0, 1.0, 1.0 + B[s], 0.1, 0.02]]
        answers.append({"spans": [[0.0, 9.0], [0.5, whole], [0.0, 1.2 * whole]], "operations": [step] * 3})
    answers[0]["spans"][1][0] = 0.0  # the step begins with the first of the stages
    table = real_model.summary(pd.DataFrame(real_model._rows("even", "1f1b", plan, asked, answers)))
    row, predicted = table.iloc[0], step_time(asked, plan)
    assert (row["layers"], row["devices"], row["steps"]) == ("2+2+1", "0 1 2", 2)
    assert row["measured [s]"] == pytest.approx(1.1 * whole) and row["spread [%]"] == pytest.approx(20 / 1.1)
    assert row["error [%]"] == pytest.approx(100 * (predicted / (1.1 * whole) - 1))
    assert row["schedule alone [%]"] == pytest.approx(100 * (1 / 1.2 - 1) / 2)
    assert row["late [%]"] == pytest.approx(100 * 0.03 * (1 + 1 / 1.2) / 2 / whole)
    rows = pd.DataFrame(real_model._rows("even", "1f1b", plan, asked, answers))
    assert np.isnan(real_model.summary(rows[rows.step < 2]).iloc[0]["spread [%]"])  # of one step


def test_drift_by_hand():
    """One part 0.3 longer, one 0.2 shorter, of 2: a tenth of that is left in the sum."""
    of_sum, absolute = real_model.drift([[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.5], [0.3, 0.5]])
    assert (of_sum, absolute) == (pytest.approx(0.05), pytest.approx(0.25))


def test_shipped_measurement_says_how_its_profile_drifted():
    more = json.loads(real_model.SHIPPED.with_suffix(".json").read_text(encoding="utf-8"))
    of_sum, absolute = real_model.drift(more["profile_s"], more["profile_again_s"])
    assert (round(of_sum, 3), round(absolute, 3)) == (-0.051, 0.126)  # what README and notebook say


def test_command_that_fails(tmp_path, monkeypatch, capsys):
    """One line and exit code 1, no file; what cannot be written is refused before anything is measured."""
    def fails():
        raise RuntimeError("stage 1 ended with exit code -9")

    monkeypatch.setattr(real_model, "run", fails)
    monkeypatch.setattr(sys, "argv", ["real_model", "--out", str(tmp_path / "new" / "a.csv")])
    with pytest.raises(SystemExit, match="^real_model: stage 1 ended with exit code -9$"):
        real_model.main()
    assert not list(tmp_path.rglob("*.*"))
    (tmp_path / "file").write_text("")
    for name, message in (("a.json", "allowed: a csv file"), ("file/a.csv", "real_model: .*file")):
        monkeypatch.setattr(sys, "argv", ["real_model", "--out", str(tmp_path / name)])
        with pytest.raises(SystemExit) as caught:
            real_model.main()
        said = f"{caught.value}\n{capsys.readouterr().err}"
        assert re.search(message, said) and "stage 1" not in said
