"""The emulated cluster: rates, jobs, the engine's programs against torch's own code, and a real run in namespaces.

What runs for real checks order, gradients, bytes and clean-up; how long it takes is measured by notebook 13 alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from nnpiper import cli, cost, simulator
from nnpiper.cost import StageArrays
from nnpiper.engine import draws, emulated, links, rendezvous, studies, tables
from nnpiper.engine.emulator import Emulator, EmulatorError, Job, read_answers
from nnpiper.engine.receives_first import receives_first, reordered
from nnpiper.engine.stage import WEIGHTS
from nnpiper.problem import InputError, Problem, Strategy
from nnpiper.schedule import B, F, stage_order

KINDS = ("1f1b", "gpipe")
JOB = Job("1f1b", 4, [0.002, 0.001, 0.003], [0.003, 0.002, 0.001], [0.0, 0.001, 0.0], [40_000, 80_000], [25e6, 50e6],
          [25e6, 100e6])


def stages_of(F, B, ahead, back, all_reduce=None):
    return StageArrays(*map(np.array, (F, B, ahead, back, np.zeros(len(F)) if all_reduce is None else all_reduce)))


# Programs of torch's schedules and their exact time

def test_a_step_worked_out_by_hand():
    """Two stages, 1F1B, M = 8. The second starts at F0 + c = 40 ms; then F, B, and an exchange of max(c ahead, c back)
    between micro-batches; the last gradient and B end it."""
    stages = stages_of([0.02, 0.03], [0.03, 0.05], [0.02], [0.01])
    assert rendezvous.step_time(stages, "1f1b", 8) == pytest.approx(0.04 + 8 * 0.08 + 7 * 0.02 + 0.01 + 0.03)
    # GPipe: it receives (c ahead), runs F; the first stage ends long before; back, the first receives and runs B
    assert rendezvous.step_time(stages, "gpipe", 8) == pytest.approx(0.02 + 8 * 0.05 + 8 * 0.05 + 0.01 + 0.03)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s, S, M", [(0, 1, 3), (0, 2, 2), (1, 2, 5), (0, 4, 4), (1, 4, 7), (2, 4, 9), (3, 4, 4),
                                     (0, 6, 11)])
def test_programs_are_what_torch_does(kind, s, S, M, monkeypatch):
    """torch's own schedule on a stage that only notes down: the same posts, waits, computations in the same order."""
    done = []

    def start(message, **_):
        done.append(("post", message))
        return SimpleNamespace(wait=lambda: done.append(("wait", message)))

    # two functions, for torch tells sends from receives by identity
    monkeypatch.setattr(dist, "isend", lambda message, **more: start(message))
    monkeypatch.setattr(dist, "irecv", lambda message, **more: start(message))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: [op.op(op.tensor) for op in batch])

    def messages(op, kind, boundary):
        def made(m):
            one = SimpleNamespace(op=op, tensor=(kind, boundary, m), group=None, tag=0, group_peer=0, peer=0)
            return [one] if 0 <= boundary < S - 1 else []
        return made

    stage = MagicMock(num_stages=S, stage_index=s, is_first=s == 0, is_last=s == S - 1)
    stage.get_fwd_recv_ops, stage.get_bwd_recv_ops = messages(dist.irecv, F, s - 1), messages(dist.irecv, B, s)
    stage.get_fwd_send_ops, stage.get_bwd_send_ops = messages(dist.isend, F, s), messages(dist.isend, B, s - 1)
    stage.forward_one_chunk = lambda m, *_, **__: done.append((F, m))
    stage.backward_one_chunk = lambda m, **_: done.append((B, m))
    schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind](stage, M, loss_fn=lambda output, target: 0.0)
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
    schedule._step_microbatches(target_mbs=[0.0] * M)

    expected = []
    for what, *rest in rendezvous.program(kind, s, S, M):
        expected += [tuple(rest)] if what == rendezvous.COMPUTE else [
            ("post" if what == rendezvous.POST else "wait", message) for message in rest[0]]
    assert done == expected
    computed = [tuple(rest) for what, *rest in rendezvous.program(kind, s, S, M) if what == rendezvous.COMPUTE]
    assert computed == list(map(tuple, stage_order(kind, S, M)[s].tolist()))


@st.composite
def steps(draw):
    S = draw(st.integers(1, 5))
    times = st.floats(0.001, 1.0)
    numbers = [draw(st.lists(times, min_size=n, max_size=n)) for n in (S, S, S - 1, S - 1, S)]
    return stages_of(*numbers), draw(st.sampled_from(KINDS)), draw(st.integers(S, 9))


@given(steps())
@settings(max_examples=100, deadline=None)
def test_rendezvous_against_the_simulator(step):
    stages, kind, M = step
    found = rendezvous.step_time(stages, kind, M)
    # a transfer never starts before its sender is done, and at best runs beside everything else
    assert found >= simulator.simulate(stages, kind, M, "overlapped") * (1 - 1e-12)
    nothing = np.zeros(len(stages.send_forward_s))
    free = StageArrays(stages.forward_s, stages.backward_s, nothing, nothing, stages.all_reduce_s)
    assert rendezvous.step_time(free, kind, M) == pytest.approx(simulator.simulate(free, kind, M, "blocking"))


# Receives before sends

def test_receives_come_first_and_the_rest_keeps_its_order():
    listed = [SimpleNamespace(op=op, name=name) for op, name in
              ((dist.isend, "a"), (dist.irecv, "b"), (dist.isend, "c"), (dist.irecv, "d"))]
    assert [op.name for op in reordered(listed)] == ["b", "d", "a", "c"]


def test_batches_are_reordered_within_the_with_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "batch_isend_irecv", seen.append)
    send, receive = SimpleNamespace(op=dist.isend), SimpleNamespace(op=dist.irecv)
    with pytest.raises(KeyError), receives_first():
        dist.batch_isend_irecv([send, receive])
        raise KeyError
    dist.batch_isend_irecv([send, receive])
    assert seen == [[receive, send], [send, receive]]


# Links

def test_every_other_stage_has_a_class_and_a_filter():
    text = links.classes_text(1, 4)
    classes = re.findall(r"class add .* classid 1:(\w+) htb", text)
    filters = dict(re.findall(r"match ip dst ([\d.]+)/32 flowid 1:(\w+)", text))
    assert filters == {links.address(peer): f"{links.class_number(peer):x}" for peer in (0, 2, 3)}
    assert set(classes) == {*filters.values(), "1"} and len(classes) == 4


def test_rates_are_those_of_the_payload():
    """50 Mb/s of payload: 1448 of 1514 bytes of a frame."""
    line, = links.rates_text({2: 50e6 / 8}).splitlines()
    rate, = re.findall(r"rate (\d+)bit", line)
    assert int(rate) == round(50e6 * 1514 / 1448) and f"classid 1:{links.class_number(2):x} " in line
    assert links.burst_bytes(1.0) == 1514 and links.burst_bytes(250e6) == round(0.2e-3 * 250e6 * 1514 / 1448)


# Jobs

def test_draws_are_the_same_each_time_and_what_they_should_be():
    drawn = draws.strategies()
    assert drawn == draws.strategies() and drawn[:3] == draws.strategies(3) and len(drawn) == 40
    for kind in KINDS:
        for link in draws.LINKS:
            part = [draw for draw in drawn if draw.job.schedule == kind and draw.links == link]
            assert sorted(draw.job.stages for draw in part) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
            np.testing.assert_allclose(sorted(draw.ratio for draw in part), np.linspace(0, 1, 10), atol=1e-12)
    for draw in drawn:
        job, S = draw.job, draw.job.stages
        assert S <= job.micro_batches <= 24
        rates = job.ahead_bytes_per_s + job.back_bytes_per_s
        assert 50e6 <= 8 * min(rates) and 8 * max(rates) <= 2e9
        assert (job.ahead_bytes_per_s == job.back_bytes_per_s) == (draw.links == "pair")
        stages = job.stage_arrays()
        transfers = np.concatenate([stages.send_forward_s, stages.send_backward_s])
        work = stages.forward_s + stages.backward_s
        assert transfers.mean() / work.mean() == pytest.approx(draw.ratio, rel=1e-3, abs=1e-4)
        assert work.max() / work.min() <= np.exp(1.4)


@pytest.fixture
def problem():
    rng = np.random.default_rng(3)
    L, K = 9, 5
    per_byte = np.exp(rng.uniform(-1, 1, (K, K))) / 10e9
    return Problem(
        forward_s=rng.uniform(0.001, 0.003, (L, K)), backward_s=rng.uniform(0.002, 0.006, (L, K)),
        output_bytes=rng.integers(1, 9, L) * 1e6, stash_bytes=np.zeros(L), static_bytes=np.zeros(L),
        gradient_bytes=rng.uniform(1, 9, L) * 1e6, memory_bytes=np.ones(K), bandwidth_bytes_per_s=1 / per_byte,
        latency_s=np.zeros((K, K)), stages=3, micro_batches=6)


PLANS = [Strategy((3, 6), ((2,), (0,), (4,))), Strategy((2, 5), ((1, 3), (0,), (2, 4)))]


@pytest.mark.parametrize("plan", PLANS)
def test_jobs_of_plans_take_what_the_cost_model_says(problem, plan):
    """At ten times the duration; links that lie within the emulated cluster's range keep their proportions."""
    scaled = draws.emulated_problem(problem, 10.0, 0.0)
    assert simulator.step_time(scaled, plan) == pytest.approx(10 * simulator.step_time(problem, plan))
    off = ~np.eye(problem.devices, dtype=bool)
    assert scaled.bandwidth_bytes_per_s[off].max() == pytest.approx(draws.FASTEST)
    late = draws.emulated_problem(problem, 10.0, 2e-4)
    job, stages = draws.strategy_job(late, plan, 2e-4), cost.stage_arrays(late, plan)
    made = job.stage_arrays(2e-4)
    for name in ("forward_s", "backward_s", "send_forward_s", "send_backward_s", "all_reduce_s"):
        np.testing.assert_allclose(getattr(made, name), getattr(stages, name), rtol=1e-12, err_msg=name)
    assert all(size % 4 == 0 for size in job.output_bytes)
    assert Job.from_json(job.to_json()) == job
    if len(plan.groups[0]) == 1:  # a device a stage: the job's links are the cluster's
        rates = [late.bandwidth_bytes_per_s[plan.groups[s][0], plan.groups[s + 1][0]] for s in range(2)]
        np.testing.assert_allclose(job.ahead_bytes_per_s, rates, rtol=1e-5)  # bytes are whole numbers


def test_links_out_of_range_are_cut(problem):
    rate = np.full((5, 5), 1e9)
    rate[0, 1] = 1e12
    scaled = draws.emulated_problem(problem.replace(bandwidth_bytes_per_s=rate), 1.0, 0.0)
    off = scaled.bandwidth_bytes_per_s[~np.eye(5, dtype=bool)]
    assert off.min() == pytest.approx(draws.SLOWEST) and off.max() == draws.FASTEST


# A stage

def test_a_stage_maps_numbers_and_gradients():
    stage = emulated.Stage(3, 0.5)
    x = torch.tensor([[2.0, 7.0, 7.0, 7.0]], requires_grad=True)
    y = stage(x)
    assert y.tolist() == [[1.0, 0.0, 0.0]]
    (y * torch.tensor([[3.0, 5.0, 5.0]])).sum().backward()
    assert x.grad.tolist() == [[1.5, 0.0, 0.0, 0.0]] and stage.weight.grad.item() == 6.0
    assert [operation[:2] for operation in stage.operations] == [["F", 0], ["B", 0]]
    begin, end = zip(*(operation[2:] for operation in stage.operations))
    assert begin[0] <= end[0] <= begin[1] <= end[1]


def answers_of(job):
    """What stages answer that did everything right, each operation in a second of its own."""
    total = np.prod(WEIGHTS[:job.stages]) * sum(range(1, job.micro_batches + 1))
    return [{"spans": [[10.0 + s, 90.0 + s], [100.0 + s, 190.0 + s]], "gradient": total / WEIGHTS[s], "sent": 7,
             "operations": [["FB"[kind], m, 101.0 + i, 102.0 + i] for i, (kind, m) in enumerate(
                 stage_order(job.schedule, job.stages, job.micro_batches)[s].tolist())]} for s in range(job.stages)]


def test_answers_become_steps_and_operations():
    run = read_answers(JOB, answers_of(JOB))
    assert run.steps_s == [82.0, 92.0] and run.sent_bytes == [7, 7, 7]
    assert len(run.operations_s) == 2 * 3 * 4 and run.operations_s["F", 1, 0] == (1.0, 2.0)


def test_wrong_answers_are_refused():
    answers = answers_of(JOB)
    answers[1]["operations"][0], answers[1]["operations"][1] = answers[1]["operations"][1], answers[1]["operations"][0]
    with pytest.raises(EmulatorError, match="stage 1: operations"):
        read_answers(JOB, answers)
    answers = answers_of(JOB)
    answers[2]["gradient"] *= 1.001
    with pytest.raises(EmulatorError, match="stage 2: gradient"):
        read_answers(JOB, answers)


# Rows and tables

def rows_of(found, **fields):
    return pd.DataFrame([{"number": i, "links": "pair", "ratio": 0.5, "latency_s": 1e-4, "overhead_s": 2e-4, "job": JOB,
                          "steps_s": [step] * 3, "step_s": step} | fields for i, step in enumerate(found)])


def test_rows_survive_their_files(tmp_path):
    rows = rows_of([0.25, 0.5])
    found = {study: rows for study in studies.STUDIES}
    studies.save(found, {"cores": 2}, tmp_path)
    again, facts = studies.load(tmp_path)
    assert facts == {"cores": 2}
    for study in studies.STUDIES:
        pd.testing.assert_frame_equal(again[study], rows)


def test_errors_are_of_the_prediction():
    exact = tables.predictions(rows_of([1.0]).iloc[0])
    assert exact["blocking"] == simulator.simulate(JOB.stage_arrays(1e-4, 2e-4), "1f1b", 4, "blocking")
    table = tables.fidelity(rows_of([exact["blocking"], exact["blocking"] / 1.04, exact["blocking"] / 0.9]))
    np.testing.assert_allclose(table["blocking [%]"], [0, 4, -10], atol=1e-9)
    summary = tables.fidelity_summary(table).set_index(["schedule", "predictor"]).loc[("all", "blocking")]
    assert summary["mean error [%]"] == pytest.approx(-2) and summary["worst |error| [%]"] == pytest.approx(10)
    assert summary["mean |error| [%]"] == pytest.approx(14 / 3)


def test_timelines_are_those_of_the_job():
    rows = rows_of([0.25])
    stages = JOB.stage_arrays(1e-4, 2e-4)
    made = cost.stage_arrays(*tables.as_problem(JOB, 1e-4, 2e-4))
    for name in ("forward_s", "backward_s", "send_forward_s", "send_backward_s"):
        np.testing.assert_allclose(getattr(made, name), getattr(stages, name), rtol=1e-12, err_msg=name)
    answered = read_answers(JOB, answers_of(JOB)).operations_s
    operations = pd.DataFrame([{"number": 0, "kind": kind, "stage": s, "micro_batch": m, "begin_s": begin, "end_s": end}
                               for (kind, s, m), (begin, end) in answered.items()])
    (number, (measured, predicted)), = tables.timelines(rows, operations).items()
    assert number == 0 and measured.step_s == 0.25
    assert (measured.start_s[F, 1, 0], measured.end_s[F, 1, 0]) == (1.0, 2.0)
    assert predicted.step_s <= simulator.simulate(stages, "1f1b", 4, "blocking")  # JOB has an all-reduce


def test_speed_ups_ranks_and_verdicts():
    fields = {"model": "gpt2", "environment": "realistic", "devices": 4, "stages": 3, "plan": ""}
    slower, slowest = (replace(JOB, forward_s=[factor * f for f in JOB.forward_s]) for factor in (2, 3))
    planners, numbers = ["nnpiper", "even", "alpa", "metis"] * 3, np.repeat([0, 1, 2], 4)
    rows = rows_of([0.02, 0.03, 0.04, 0.02, 0.02, 0.03, 0.04, 0.02, 0.02, 0.05, 0.1, 0.02], **fields).assign(
        planner=planners, number=numbers, job=[JOB, slower, slowest, JOB] * 3)
    rows.at[1, "steps_s"] = [0.03]
    table = tables.steps(rows)
    np.testing.assert_allclose(table["speed-up measured [%]"], [0, 50, 100, 0, 0, 50, 100, 0, 0, 150, 400, 0])
    assert list(table["run of"][:4]) == ["nnpiper", "even", "alpa", "nnpiper"]
    assert list(table["steps run"][:2]) == [3, 1] and list(table["spread [%]"].isna()[:2]) == [False, True]
    alpa = tables.speedups(table).set_index(["planner", "environment"]).loc[("alpa", "all")]
    assert alpa["ahead"] == 3 and alpa["median measured [%]"] == pytest.approx(100)
    assert alpa["mean measured [%]"] == pytest.approx(200)
    spreads = {("gpt2", "realistic", 4, 3, number): 2.0 + number for number in range(3)}
    shown = tables.problems(table, spreads)
    assert list(shown["fastest / slowest link"]) == [2, 3, 4] and shown["even [%]"].tolist() == pytest.approx(
        [50, 50, 150])
    # six runs of others, as Metis has NNPiper's: even's and alpa's three, ranks by prediction and by measurement
    expected = np.corrcoef([2, 2, 2, 5, 5, 5], [1.5, 1.5, 5, 3.5, 3.5, 6])[0, 1]
    assert tables.rank_correlations(table)["over NNPiper's"] == pytest.approx(expected)
    assert tables.spearman(pd.Series([1, 2, 3, 4]), pd.Series([10, 30, 20, 40])) == pytest.approx(0.8)
    fidelity = tables.fidelity(rows_of([tables.predictions(rows.iloc[0])["blocking"]]))
    verdicts = tables.targets(fidelity, table)["verdict"]
    assert verdicts[0] == "holds" and verdicts[5] == "does not hold"
    assert set(tables.targets(fidelity, table, tables.NOT_RUN)["verdict"]) == {tables.NOT_RUN}


def test_the_shipped_measurements_can_be_read():
    found, facts = studies.load()
    assert len(found["fidelity"]) == draws.DRAWS
    assert {"date", "kernel", "processor", "cores", "torch"} <= facts.keys()
    drawn = {draw.number: draw.job for draw in draws.strategies()}
    for _, row in found["fidelity"].iterrows():
        np.testing.assert_allclose(row["job"].forward_s, drawn[row["number"]].forward_s)
        assert len(row["steps_s"]) == studies.STEPS
        assert row["step_s"] == pytest.approx(np.median(row["steps_s"]), abs=1e-6)


# What is missing, or fails

FAKE = """#!{shell}
case "$(cat)" in *{word}*) echo "RTNETLINK answers: No such file" >&2; echo "Command failed -:3" >&2; exit 1;; esac
"""


@pytest.mark.parametrize("tool, word", [("ip", "gso_max_size"), ("ip", "veth"), ("tc", "u32")])
def test_a_tool_that_cannot_do_it_all_is_found_by_the_trial(tool, word, tmp_path, monkeypatch):
    """In place of namespaces the hub runs as it is, where its first step that would change anything is refused."""
    for name in ("ip", "tc"):
        fake = tmp_path / name
        fake.write_text(FAKE.format(shell=shutil.which("bash"), word=word if name == tool else "nothing"))
        fake.chmod(0o755)
    (tmp_path / "unshare").write_text(f'#!{shutil.which("bash")}\nshift\nexec "$@"\n')
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr(links, "environment", lambda: {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    monkeypatch.setattr(links, "TOOLS", ("ip", "tc"))
    monkeypatch.setattr(links, "SETTINGS", {})
    monkeypatch.setattr(links, "enter_command", lambda command, _: command)
    lacking = links.access().lacking
    where = "" if word == "veth" else "stage 0: "
    said = f"{where}{tool}: RTNETLINK answers: No such file; Command failed -:3"
    assert lacking.endswith(f"(in a user namespace: {said}; as root: {said})") and "\n" not in lacking


def test_a_trial_that_hangs_or_says_nothing_is_a_lack(monkeypatch):
    monkeypatch.setattr(links, "TOOLS", ())
    monkeypatch.setattr(links, "TRIAL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(links, "enter_command", lambda command, found: ["sleep", "20"] if found.as_root else ["false"])
    assert links.access().lacking.endswith("(in a user namespace: exit code 1; as root: no answer in 0.1 s)")


def test_a_folder_that_cannot_be_written_is_said_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(studies, "measure_all", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert cli.main(["engine", "--out", str(tmp_path / "file")]) == 2
    assert cli.main(["engine", "--out", str(tmp_path / "file" / "below")]) == 2
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main(["engine", "--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "allowed: a folder" in said[0] and "may be written" in said[2]


@pytest.mark.parametrize("ranks", [0, 9])
def test_ranks_have_a_range(ranks):
    with pytest.raises(InputError, match="allowed: 1 to 8"):
        Emulator(ranks)


@pytest.mark.parametrize("script, said", [('print(\'{"failed": "stage 1: no"}\')', "stage 1: no"),
                                          ("exit(3)", "ended with exit code 3")])
def test_a_start_that_fails_leaves_nothing_open(script, said, monkeypatch):
    monkeypatch.setattr(links, "access", links.Access)
    monkeypatch.setattr(links, "enter_command", lambda *_: [sys.executable, "-c", script])
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])
    with pytest.raises(EmulatorError, match=said):
        Emulator(2)
    process, = started
    assert process.returncode is not None and process.stdin.closed and process.stdout.closed


# For real

lacking = links.access().lacking
real = pytest.mark.skipif(bool(lacking), reason=lacking)


@real
def test_an_emulated_cluster_runs_both_schedules():
    with Emulator(3) as emulator:
        with pytest.raises(InputError, match="at most 3"):
            emulator.run(Job("1f1b", 4, [0.0] * 4, [0.0] * 4, [0.0] * 4, [4] * 3, [1e6] * 3, [1e6] * 3), 1)
        for kind in KINDS:
            job = Job.from_json(json.dumps(json.loads(JOB.to_json()) | {"schedule": kind}))
            # raises where order or gradients are wrong; GPipe's batches are of one direction each
            run = emulator.run(job, 2, receives_first=kind == "1f1b")
            assert len(run.steps_s) == 2
            for (_, s, _), (begin, end) in run.operations_s.items():  # sleeps are never short
                assert end - begin >= min(job.forward_s[s], job.backward_s[s])
            # each activation and gradient left its stage once, through the network
            payload = 4 * np.array([40_000, 40_000 + 80_000, 80_000])
            assert (payload <= run.sent_bytes).all() and (run.sent_bytes <= 1.1 * payload).all()
            for s in range(2):  # nothing starts before what it waits for has been computed
                for m in range(4):
                    assert run.operations_s["F", s + 1, m][0] > run.operations_s["F", s, m][1]
                    assert run.operations_s["B", s, m][0] > run.operations_s["B", s + 1, m][1]


@real
def test_nothing_is_left_after_a_kill():
    def interfaces():
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.count("\n")

    before = interfaces()
    script = ("import time\nfrom nnpiper.engine.emulator import Emulator\n"
              "emulator = Emulator(2)\nprint('up', flush=True)\ntime.sleep(600)\n")
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    inside = psutil.Process(owner.pid).children(recursive=True)
    stages = [process for process in inside if "nnpiper.engine.stage" in process.cmdline()]
    spaces = {os.readlink(f"/proc/{process.pid}/ns/net") for process in stages}
    assert len(stages) == 2 and len(spaces - {os.readlink("/proc/self/ns/net")}) == 2  # a namespace for each
    assert interfaces() == before  # all links are inside
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(inside, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert interfaces() == before


@real
def test_a_stage_that_dies_ends_the_emulator():
    with Emulator(2) as emulator:
        stages = [process for process in psutil.Process(emulator.process.pid).children(recursive=True)
                  if "nnpiper.engine.stage" in process.cmdline()]
        stages[1].kill()
        begin = time.monotonic()
        with pytest.raises(EmulatorError, match="stage 1: ended with exit code -9"):
            emulator.run(Job("1f1b", 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, [4], [1e6], [1e6]), 1)
        assert time.monotonic() - begin < 120  # it does not wait for ever


@real
def test_a_stage_that_fails_is_one_line(capfd):
    with Emulator(2) as emulator, pytest.raises(EmulatorError) as caught:
        emulator._ask("no such thing")
    assert str(caught.value).startswith("emulated cluster: stage ") and "KeyError: 'no such thing'" in str(caught.value)
    assert capfd.readouterr().err == ""
