"""What every answer to a hostile case must be: valid, with exit code 0, or 3 where memory is short; or exit code 2 and
one clear line. `check` runs a case in this process and raises AssertionError for anything else.

A valid answer is checked anew from the files: the strategy by `Strategy.check`, memory by the cost model, the step by
the simulator. Symbols: S stages.
"""

import contextlib
import io
import json
import math
import signal
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from hostile import Case
from instances import random_problem

from nnpiper import cli, cluster, cluster_file, cost, plan_file, planning, simulator
from nnpiper.baselines import PLANNERS
from nnpiper.measured import MeasuredChain
from nnpiper.paths import DATA
from nnpiper.problem import SCHEDULES, InputError, Problem, Strategy
from nnpiper.workload import chain

LONGEST_LINE = 3000  # an error names a path, a value and what is allowed
COMPILING_S = 600.0
OUTPUTS = ("--out", "--report", "--timeline")


class Late(BaseException):
    """The time is up. No `except Exception` catches it."""


def check(case: Case, folder: Path, limit_s: float) -> int:
    """Run a case whose files lie in `folder`; returns its exit code (a call: 0, or 2 where it was refused). Raises
    AssertionError or Late for an answer that must not be, and whatever the package raises."""
    before = _listing(folder)
    begin = time.perf_counter()
    with _limit(limit_s), warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, err = _call(case.call) if case.call else _command(case.command)
        took_s = time.perf_counter() - begin
        assert took_s < limit_s, f"took {took_s:.1f} s"
        if case.call is None:
            _judge(case.command, code, out, err, folder)
    made = _listing(folder) - before
    wanted = {str(Path(path)) for name, path in _options(case.command or [], OUTPUTS)} if code in (0, 3) else set()
    wanted |= {str(parent) for path in wanted for parent in Path(path).parents}
    assert made <= wanted, f"left {sorted(made - wanted)}"
    assert before <= _listing(folder), "a file is gone"
    return code


def compile_kernels() -> None:
    """Compile what a case may need, so that compiling is in no case's time."""
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            path = Path(folder, f"{schedule}.json")
            problem = random_problem(np.random.default_rng(0), K=3, L=6, S=2, M=4, schedule=schedule)
            path.write_text(problem.to_json(), encoding="utf-8")
            for planner in cli.PLANNERS:
                check(Case("", ["solve", str(path), "--planner", planner]), Path(folder), COMPILING_S)
        lab = str(DATA / "clusters" / "lab.toml")
        for model in ("gpt2", "gpt3-175b"):  # one fits, one does not
            check(Case("", ["plan", lab, "--model", model, "--micro-batches", "4"]), Path(folder), COMPILING_S)


def _listing(folder):
    return {str(path) for path in folder.rglob("*")}


@contextlib.contextmanager
def _limit(seconds):
    def stop(*_):
        raise Late(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _call(function):
    try:
        value = function()
    except InputError as error:
        _check_line(f"{error}\n")
        return 2, "", ""
    if isinstance(value, planning.Plan):
        _check_plan(value.problem, value.strategy, value.feasible, value.step_s)
        assert value.feasible or value.advice
        assert math.isfinite(value.latency_s) and 0 <= value.bubble <= 1
    elif isinstance(value, MeasuredChain):
        for name in ("forward_s", "backward_s", "output_bytes", "stash_bytes", "static_bytes", "gradient_bytes"):
            array = getattr(value, name)
            assert ((array >= 0) & (array < math.inf)).all(), name
    return 0, "", ""


def _command(words):
    """Exit code, stdout, stderr of a command line, both streams as a terminal of UTF-8 would have them."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        code = cli.main(words)
    return code, *(stream.buffer.getvalue().decode("utf-8") for stream in streams)


def _judge(words, code, out, err, folder):
    assert code in (0, 2, 3), f"exit code {code}"
    if code == 2:
        assert words[:1] == ["solve"] or out == "", out
        assert err.startswith("nnpiper: ")
        _check_line(err)
        return
    if code == 3:
        left = [line for line in err.splitlines() if not line.endswith("not written, the plan does not fit")]
        assert left == [], err
    else:
        assert err == "", err
    if any(word in ("--help", "-h") for word in words) and not out.startswith("{"):
        assert "Usage" in out
        return
    {"plan": _plan, "solve": _solve, "simulate": _simulate, "compare": _compare, "export": _export}[words[0]](
        words, code, out)


def _check_line(text):
    assert text.endswith("\n") and text.count("\n") == 1, text
    line = text[:-1]
    assert 10 < len(line) < LONGEST_LINE, f"{len(line)} characters: {line[:200]}"
    assert all(c.isprintable() for c in line), ascii(line)
    assert "Traceback" not in line and "Error(" not in line, line


def _numbers(text):
    """Parse JSON that holds neither NaN nor infinity."""
    def refuse(name):
        raise AssertionError(f"{name} in {text[:500]}")

    return json.loads(text, parse_constant=refuse)


def _options(words, names):
    """(name, value) of options on a command line, the last of each."""
    found = {}
    for word, value in zip(words, [*words[1:], ""]):
        if word in names:
            found[word] = value
        elif word.split("=")[0] in names:
            found[word.split("=")[0]] = word.split("=", 1)[1]
    return found.items()


def _file(words):
    """The first word of a command line that is a file."""
    for word in words[1:]:
        with contextlib.suppress(OSError):
            if Path(word).is_file():
                return word
    raise AssertionError(f"no file among {words}")


def _check_plan(problem, strategy, feasible, step_s):
    strategy.check(problem)
    assert feasible == (cost.overflow_bytes(problem, strategy) == 0)
    assert math.isfinite(step_s) and step_s == simulator.step_time(problem, strategy)


def _plan(words, code, out):
    given = dict(_options(words, (*OUTPUTS, "--pin", "--stages", "--max-devices", "--model", "--micro-batches",
                                  "--micro-batch-size", "--sequence-length", "--schedule", "--transfers")))
    if code == 3:
        if out.startswith("{"):
            answer = _numbers(out)
            assert answer["feasible"] is False and answer["short"] and answer["advice"]
            assert all(0 < each["bytes"] < math.inf and each["device"] for each in answer["short"])
        else:
            assert "DOES NOT FIT" in out and " is short by " in out and "advice: " in out
        _check_nothing_fits(words, given)
        assert not any(Path(given[name]).is_file() for name in OUTPUTS if name in given)
        return
    if out.startswith("{"):
        text = out
    elif "--out" in given:
        text = Path(given["--out"]).read_text(encoding="utf-8")
    else:
        assert "bottleneck: " in out and "DOES NOT FIT" not in out
        for number in ("nan", "inf"):
            assert f" {number} " not in out and f" {number}%" not in out, out
        return
    _numbers(text)
    written = plan_file.PlanFile.model_validate_json(text)
    plan_file.check(written)
    asked = cluster_file.load(_file(words))
    workload = chain(written.model, written.micro_batch_size, written.sequence_length, written.recompute)
    problem = cluster.problem(workload, asked, len(written.groups), written.micro_batches, written.schedule,
                              written.transfers)
    _check_plan(problem, written.strategy, True, written.step_s)
    assert [device.name for device in written.devices] == list(asked.labels)
    if "--out" in given:
        assert Path(given["--out"]).read_text(encoding="utf-8") == text
    if "--report" in given:
        page = Path(given["--report"]).read_text(encoding="utf-8")
        assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")


def _check_nothing_fits(words, given):
    """A plan that fills the devices one after the other must not fit either, for any number of stages."""
    if "--pin" in given or "--max-devices" in given:
        return
    asked = cluster_file.load(_file(words))
    length = given.get("--sequence-length")
    workload = chain(given["--model"], _integer(given.get("--micro-batch-size", "1")), length and _integer(length),
                     "--recompute" in words)
    stages = given.get("--stages", "auto")
    for S in range(1, min(asked.devices, workload.layers) + 1) if stages == "auto" else [int(stages)]:
        schedule = given.get("--schedule", "auto").replace("auto", "1f1b")  # which keeps the fewer micro-batches
        problem = cluster.problem(workload, asked, S, _integer(given["--micro-batches"]), schedule)
        assert cost.fill_memory(problem, 1.0) is None, f"a plan of {S} stages fits"


def _integer(text):
    """As the command line reads it, which takes 8.0 and 1_000."""
    return int(float(text))


def _solve(words, code, out):
    answers = out.splitlines()
    if not out.startswith("{"):
        assert len(answers) % 2 == 0 and ("over memory" in out) == (code == 3)
        return
    answers = [_numbers(line) for line in answers]
    for answer in answers:
        problem = Problem.from_file(answer["file"])
        _check_plan(problem, _strategy(answer), answer["feasible"], answer["step_s"])
        if answer["planner"] == "nnpiper" and not answer["feasible"]:
            assert cost.fill_memory(problem, 1.0) is None
    assert (code == 3) == any(not answer["feasible"] for answer in answers)


def _strategy(answer):
    return Strategy(tuple(answer["cuts"]), tuple(map(tuple, answer["groups"])))


def _simulate(words, code, out):
    if not out.startswith("{"):
        assert out.startswith("step ") and ("does not fit" in out) == (code == 3)
        return
    answer = _numbers(out)
    problem = Problem.from_file(answer["file"])
    _check_plan(problem, _strategy(answer), code == 0, answer["step_s"])
    assert answer["strategy_bound_s"] <= answer["step_s"] * (1 + 1e-9)
    assert all(-1e-9 <= stage["idle_share"] <= 1 for stage in answer["stages"])


def _compare(words, code, out):
    if not out.startswith("{"):
        assert "nnpiper" in out and " nan" not in out
        return
    rows = [_numbers(line) for line in out.splitlines()]
    assert {row["planner"] for row in rows} == {"nnpiper", *PLANNERS}
    problem = None if "--model" in words else Problem.from_file(_file(words))
    for row in rows:
        assert row["note"] or row["cuts"] is not None
        if problem is not None and row["cuts"] is not None:
            _check_plan(problem, _strategy(row), row["feasible"], row["step_s"])
    assert (code == 3) == (not any(row["feasible"] for row in rows))


def _export(words, code, out):
    given = dict(_options(words, ("--out",)))
    text = Path(given["--out"]).read_text(encoding="utf-8") if "--out" in given else out
    assert len(text) > 20 and code == 0
