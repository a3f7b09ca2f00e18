"""Published runs: the reader against the raw files, predictions against sums by hand, the serial engine against closed
forms and the simulator. What needs the files is skipped where the folder is missing."""

import json
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnpiper import importers
from nnpiper.cost import StageArrays
from nnpiper.engine import published
from nnpiper.problem import InputError
from nnpiper.simulator import simulate

FOLDER = published.FOLDER
needs_files = pytest.mark.skipif(not (FOLDER / "measured_steps").is_dir(),
                                 reason="no folder shared/profiles/sailor/measured_steps beside the repository")


@pytest.fixture(scope="module")
def runs():
    return {run.name: run for run in published.read_runs()}


def raw(name):
    return json.loads((FOLDER / name).read_text())


def times(device, micro_batch, degree):
    """[26, 3] of a profile file."""
    return np.array(list(raw(f"profiles/OPT-350/{device}.json")[str(micro_batch)][str(degree)].values()))


def weights(degree):
    """[26] bytes of one GPU's part of the layers."""
    return np.array([layer["params_bytes"] for layer in raw("llm_info.json")["OPT-350"][str(degree)].values()])


def rate(sender, receiver):
    zone = "us-central1-a"
    return raw("multizone_bandwidths_het.json")[zone][sender]["1"][zone][receiver]["1"][1]


# The reader


@needs_files
def test_every_run_is_read_whole(runs):
    files = sorted((FOLDER / "measured_steps").glob("*.json"))
    assert len(runs) == len(files) == 19
    for path in files:
        run, file = runs[path.stem.replace("plan_config_", "")], json.loads(path.read_text())
        stages = file["pipeline_list"][0]["layers_per_stage"]
        assert [b - a for a, b in pairwise([0, *run.cuts, 26])] == list(map(len, stages))
        assert sum(map(len, run.devices)) == file["N"]  # a node is one device
        assert run.micro_batches * run.micro_batch_size * len(run.devices[0]) == file["gbs"]
        assert (run.measured_s, run.reduce_s) == (file["real"], file["red_grads"])
        run.strategy.check(published.problem(run))


FILE = {"zone": "z", "mbs": 2, "gbs": 8, "real": 1.0, "red_grads": 0.0, "pipeline_list": [
    {"num_stages": 2, "layers_per_stage": [[0], [1, 2]], "dp": [2, 2],
     "tmp_per_stage": [[[[["A", 4, "z"]], 4], [[["B", 4, "z"]], 4]], [[[["A", 4, "z"]], 4], [[["A", 4, "z"]], 4]]]}]}


def test_a_run_from_its_file(tmp_path):
    path = tmp_path / "lab_plan_config_N4.json"
    path.write_text(json.dumps(FILE))
    assert published.read_run(path) == published.Run(
        "lab_N4", "z", (1,), (("A", "B"), ("A", "A")), 4, 2, 2, 1.0, 0.0)
    assert published.read_run(path).strategy.groups == ((0, 1), (2, 3))


@pytest.mark.parametrize("change, message", [
    (lambda file: file["pipeline_list"][0].update(layers_per_stage=[[0], [2, 1]]), "layers_per_stage: .*chain 0, 1, 2"),
    (lambda file: file["pipeline_list"][0]["tmp_per_stage"][0].pop(), "as many replicas in every stage"),
    (lambda file: file["pipeline_list"][0]["tmp_per_stage"][1][0].__setitem__(1, 2), "all of one tensor-parallel"),
    (lambda file: file.update(gbs=10), "gbs 10, mbs 2; allowed: .*a multiple of replicas x mbs"),
    (lambda file: file.update(real=0), "real: 0"),
    (lambda file: file.update(pipeline_list=[]), "pipeline_list"),
])
def test_bad_files(tmp_path, change, message):
    file, path = json.loads(json.dumps(FILE)), tmp_path / "a.json"
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(InputError, match=message) as caught:
        published.read_run(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_no_runs(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="measured_steps: no .*; allowed: a folder with one file a run"):
        published.read_runs(tmp_path)
    monkeypatch.setattr(sys, "argv", ["published", "--folder", str(tmp_path), "--out", str(tmp_path / "a.csv")])
    with pytest.raises(SystemExit, match="^published: .*measured_steps: no"):
        published.main()
    assert not (tmp_path / "a.csv").exists()


# Predictions by hand


@needs_files
def test_data_parallel_run_by_hand(runs):
    run = runs["mixed_N6_D6"]  # one stage, six replicas of eight GPUs, 24 micro-batches each
    slowest = max(times(name, 2, 8)[:, :2].sum() for name in ("RTX-3090", "RTX-2080", "Titan-RTX"))
    link = min(rate(a, b) for a in set(run.devices[0]) for b in set(run.devices[0]) if a != b)
    reduce_s = 2 * 5 / 6 * weights(8).sum() / link
    assert published.predict(run, "equal shares") == pytest.approx(24 * slowest + reduce_s, rel=1e-12)
    assert published.predict(run, "one card") == pytest.approx(24 * slowest + 8 * reduce_s, rel=1e-12)
    assert published.predict(run, "2 bytes") == pytest.approx(24 * slowest + reduce_s / 2, rel=1e-12)
    # shared by speed: each pass as long as on the replica where its share of it takes longest
    alone = np.array([times(name, 2, 8)[:, :2].sum(axis=0) for name in run.devices[0]])  # [6, 2]
    share = 6 * (1 / alone.sum(axis=1)) / (1 / alone.sum(axis=1)).sum()
    shared = (share[:, None] * alone).max(axis=0).sum()
    assert published.predict(run, "plain") == pytest.approx(24 * shared + reduce_s, rel=1e-12)


@needs_files
def test_pipelined_run_by_hand(runs):
    run = runs["mixed_N2_D1"]  # RTX-3090 with 12 layers, Titan-RTX with 14, which is the slower stage
    fast, slow = times("RTX-3090", 2, 2)[:12, :2].sum(axis=0), times("Titan-RTX", 2, 2)[12:, :2].sum(axis=0)
    size = 2 * 2048 * 1024 * 4
    ahead, back = size / rate("RTX-3090", "Titan-RTX"), size / rate("Titan-RTX", "RTX-3090")
    assert slow.sum() > fast.sum() + ahead
    blocking = fast[0] + ahead + 128 * (slow.sum() + back) + fast[1]
    assert published.predict(run, "equal shares") == pytest.approx(blocking, rel=1e-12)
    # receiving keeps the slow stage, too; the last micro-batch of the 128 pays its way in once, as the first does
    assert published.predict(run, "both sides") == pytest.approx(blocking + 127 * ahead, rel=1e-12)
    update_s = max(times("RTX-3090", 2, 2)[:12, 2].sum(), times("Titan-RTX", 2, 2)[12:, 2].sum())
    assert 0 < published.predict(run, "update") - blocking <= update_s * (1 + 1e-9)
    assert published.predict(run, "tied") == pytest.approx(  # the first stage ends last
        blocking + weights(2)[25] / rate("RTX-3090", "Titan-RTX"), rel=1e-12)


@needs_files
@pytest.mark.parametrize("degree", [1, 8])
def test_gradients_of_the_gpus_behind_one_card(degree):
    files = {"RTX-2080": FOLDER / "profiles/OPT-350/RTX-2080.json"}
    chains = [importers.sailor(files, FOLDER / "llm_info.json", "OPT-350", 2, degree, shared)
              for shared in (False, True)]
    assert chains[0].gradient_bytes.tolist() == weights(degree).tolist()
    assert chains[1].gradient_bytes.tolist() == (degree * weights(degree)).tolist()
    for name in ("forward_s", "backward_s", "output_bytes", "stash_bytes", "static_bytes"):
        assert getattr(chains[0], name).tolist() == getattr(chains[1], name).tolist()
    assert chains[0].forward_s[:, 0].tolist() == times("RTX-2080", 2, degree)[:, 0].tolist()


# What the runs say


@needs_files
def test_one_card_holds_for_every_run_of_the_mixed_cluster(runs):
    for run in runs.values():
        if run.cluster == "mixed":
            before, after = (abs(published.predict(run, change) / run.measured_s - 1) for change in (
                "equal shares", "one card"))
            assert after <= before * (1 + 1e-9), run.name
            if len(run.devices[0]) > 1:
                assert after < 0.05, run.name


@needs_files
def test_which_cluster_shares_a_card():
    """The rate between nodes grows with the GPUs that send on the GH200 nodes alone."""
    zone = "us-central1-a"
    table = raw("multizone_bandwidths_het.json")[zone]
    for a, b, count, factor in (("GH-96", "GH-96", "4", 4.0), ("RTX-3090", "RTX-2080", "8", 1.0),
                                ("RTX-2080", "RTX-3090", "8", 1.0)):
        entry = table[a][count][zone][b]
        assert entry[count][1] == pytest.approx(factor * rate(a, b), rel=0.03)


@needs_files
def test_why_small_micro_batches_on_gh200_are_apart():
    """Their profile says that one sequence takes longer than two."""
    assert times("GH-96", 1, 4)[:, 0].sum() > 1.5 * times("GH-96", 2, 4)[:, 0].sum()
    assert times("GH-96", 8, 4)[:, 0].sum() > 1.5 * times("GH-96", 4, 4)[:, 0].sum()  # as it should be


@needs_files
def test_shipped_errors_are_what_the_command_writes(tmp_path, monkeypatch):
    out = tmp_path / "steps.csv"
    monkeypatch.setattr(sys, "argv", ["published", "--out", str(out)])
    published.main()
    pd.testing.assert_frame_equal(pd.read_csv(out), pd.read_csv(published.SHIPPED), rtol=1e-4)


def test_mean_errors_by_hand():
    rows = [("gh200_N1_D1", 1, -40.0), ("gh200_N2_D1", 8, 10.0), ("gh200_N4_D1", 2, -20.0), ("mixed_N2_D1", 2, 4.0)]
    table = pd.DataFrame([{"run": name, "micro-batch": b, **dict.fromkeys(published.CHANGES, error)}
                          for name, b, error in rows])
    first = published.mean_errors(table).iloc[0].to_dict()
    assert first == {"change": "plain", "gh200, all (3 runs)": pytest.approx(70 / 3), "gh200, all, worst": 40.0,
                     "gh200 without N1 (2 runs)": 15.0, "gh200 without N1, worst": 20.0,
                     "gh200, micro-batch 8 (1 runs)": 10.0, "gh200, micro-batch 8, worst": 10.0,
                     "mixed (1 runs)": 4.0, "mixed, worst": 4.0}


# The engine that sends and receives one after the other


seconds = st.floats(0.01, 1.0)


@st.composite
def stages_and_micro_batches(draw):
    S = draw(st.integers(1, 5))
    F, B = (np.array(draw(st.lists(seconds, min_size=S, max_size=S))) for _ in range(2))
    ahead, back = (np.array(draw(st.lists(seconds, min_size=S - 1, max_size=S - 1))) for _ in range(2))
    all_reduce = np.array(draw(st.lists(seconds, min_size=S, max_size=S)))
    return StageArrays(F, B, ahead, back, all_reduce), draw(st.integers(1, 9))


@given(stages_and_micro_batches())
def test_one_by_one_against_the_simulator(drawn):
    stages, M = drawn
    S, nothing = len(stages.forward_s), np.zeros(len(stages.send_forward_s))
    even = StageArrays(np.full(S, 0.2), np.full(S, 0.3), nothing, nothing, np.zeros(S))
    assert published.one_by_one(even, M) == pytest.approx((M + S - 1) * 0.5, rel=1e-12)  # nobody waits
    step_s = published.one_by_one(stages, M)
    assert step_s >= simulate(stages, "1f1b", M, "blocking") * (1 - 1e-12)
    # no stage and no link does more than all that there is to do, one thing at a time
    everything = M * sum(array.sum() for array in (stages.forward_s, stages.backward_s, stages.send_forward_s,
                                                   stages.send_backward_s)) + stages.all_reduce_s.max()
    assert step_s <= everything * (1 + 1e-12)
    alone = sum(array.sum() for array in (stages.forward_s, stages.backward_s, stages.send_forward_s,
                                          stages.send_backward_s))
    assert published.one_by_one(stages, 1) >= alone * (1 - 1e-12)


def test_one_by_one_by_hand():
    """Two stages, two micro-batches: a transfer of 10 ahead waits for the receiver, a gradient of 5 comes first."""
    stages = StageArrays(np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([10.0]), np.array([5.0]), np.zeros(2))
    # stage 0: F0 0-1, send 1-11, F1 11-12, gradient of B0, send of F1, B0, gradient of B1, B1
    # stage 1: F0 11-13, B0 13-17, gradient 17-22, receive F1 22-32, F1 32-34, B1 34-38, gradient 38-43
    # stage 0: B1 43-46
    assert published.one_by_one(stages, 2) == 46.0


def ticks(s, S, M):
    """What stage s does by the ticks of DeepSpeed's TrainSchedule (deepspeed/runtime/pipe/schedule.py of
    deepspeedai/DeepSpeed at commit 83fd8f8; before issue 2800 the two transfers of a tick came in the other order):
    stages of one parity go forward at even ticks, those of the other at odd ones; a tick first exchanges, then
    computes."""
    out, before = [], -1
    for tick in range(2 * (M + S - 1)):
        forward = tick % 2 == s % 2
        m = (tick - s) // 2 if forward else (tick + s + 1) // 2 - S
        if forward:
            out += [("B", s - 1, before)] * (s > 0 and 0 <= before < M) + [("F", s - 1, m)] * (s > 0 and 0 <= m < M)
        else:
            out += [("B", s, m)] * (s < S - 1 and 0 <= m < M) + [("F", s, before)] * (s < S - 1 and 0 <= before < M)
        out += [("F" if forward else "B",)] * (0 <= m < M)
        before = m
    return out


@pytest.mark.parametrize("S, M", [(1, 3), (2, 1), (2, 4), (3, 2), (4, 3), (4, 9), (5, 5)])
def test_the_order_is_that_of_deepspeed(S, M):
    for s in range(S):
        program = [("FB"[kind], *rest) for kind, *rest in published._serial_program(s, S, M)[::-1]]
        assert program == ticks(s, S, M)
