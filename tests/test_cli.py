"""The command line, mostly in this process: answers, exit codes, and hostile input refused with one line."""

import json
import os
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import refused, run
from instances import random_problem

from nnpiper import cli, cost, simulator
from nnpiper.problem import Problem, Strategy

FIELDS = ["file", "planner", "cuts", "groups", "step_s", "feasible", "overflow_bytes", "lower_bound_s", "solve_ms"]


@pytest.fixture
def problem():
    return random_problem(np.random.default_rng(5), K=4, L=6, S=3, M=4, schedule="1f1b", transfers="blocking")


@pytest.fixture
def problem_file(problem, tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(problem.to_json())
    return path


@pytest.fixture
def full_file(problem, tmp_path):
    """The same problem on devices without memory."""
    path = tmp_path / "full.json"
    path.write_text(problem.replace(memory_bytes=np.full(4, 1.0)).to_json())
    return path


def test_the_planners_are_those_there_are():
    from nnpiper.baselines import PLANNERS
    assert set(cli.PLANNERS) == set(PLANNERS) | set(cli.LEARNED)


@pytest.mark.parametrize("planner", cli.PLANNERS)
def test_every_planner_answers_with_a_valid_plan_and_its_exact_step(planner, problem, problem_file, capsys):
    if planner in cli.LEARNED:
        pytest.importorskip("nnpiper.solver")
        if not cli.ROOT.joinpath("data/checkpoint/nnpiper.pt").exists():
            pytest.skip("no shipped checkpoint")
    options = ["--budget-ms", "20"] if planner in (*cli.LEARNED, "anneal") else []
    code, out, err = run(capsys, "solve", problem_file, "--planner", planner, "--json", *options)
    assert (code, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    assert list(answer) == FIELDS
    strategy = Strategy(tuple(answer["cuts"]), tuple(map(tuple, answer["groups"])))
    strategy.check(problem)
    assert answer["step_s"] == simulator.step_time(problem, strategy)
    assert answer["feasible"] is True and answer["overflow_bytes"] == 0.0
    assert 0.0 < answer["lower_bound_s"] <= answer["step_s"] * (1 + 1e-9)
    assert (answer["file"], answer["planner"]) == (str(problem_file), planner)
    assert 0.0 < answer["solve_ms"] < 5000.0


WATCHED = """
import sys
from numba.core import event
from nnpiper import cli, solver
from nnpiper.network import Network

def counted(function):
    def call(problem):
        with event.install_recorder("numba:compile") as compiled:
            result = function(problem)
        print(len(compiled.buffer), file=sys.stderr)
        return result
    return call

untrained, planner = solver.NNPiper(Network().eval()), cli._planner
solver.NNPiper.from_pretrained = lambda: untrained
cli._planner = lambda *arguments: map(counted, planner(*arguments))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("planner", ["exact", "nnpiper"])
def test_compiling_does_not_count(planner, problem_file, tmp_path):
    """In a new process with no compiled code at hand, all is compiled by the time that the clock starts."""
    done = subprocess.run([sys.executable, "-c", WATCHED, "solve", str(problem_file), "--planner", planner, "--json"],
                          env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
                          check=True)
    before, during = map(int, done.stderr.split())
    assert before > 0 and during == 0


def test_one_object_a_line_in_the_order_of_the_files(problem_file, full_file, capsys):
    code, out, _ = run(capsys, "solve", full_file, problem_file, "--planner", "even", "--json")
    first, second = map(json.loads, out.splitlines())
    assert [first["file"], second["file"]] == [str(full_file), str(problem_file)]
    assert code == 3 and first["feasible"] is False and second["feasible"] is True
    strategy = Strategy(tuple(first["cuts"]), tuple(map(tuple, first["groups"])))
    assert first["overflow_bytes"] == cost.overflow_bytes(Problem.from_file(full_file), strategy) > 0


def test_solve_for_people(problem_file, full_file, capsys):
    code, out, _ = run(capsys, "solve", problem_file, "--planner", "even")
    first, second = out.splitlines()
    Strategy.parse(first.removeprefix(f"{problem_file}: ")).check(Problem.from_file(problem_file))
    assert code == 0 and "fits in memory, even took" in second
    code, out, _ = run(capsys, "solve", full_file, "--planner", "even")
    assert code == 3 and "GB over memory" in out


def test_seeds_repeat(problem_file, capsys):
    def plan(seed):
        fields = json.loads(run(capsys, "solve", problem_file, "--planner", "anneal", "--seed", seed, "--json")[1])
        return fields["cuts"], fields["groups"], fields["step_s"]

    assert plan(7) == plan(7)


def test_a_planner_that_cannot_take_a_problem_says_its_limit(tmp_path, capsys):
    big = random_problem(np.random.default_rng(1), K=40, L=40, S=8, M=4)
    (tmp_path / "big.json").write_text(big.to_json())
    assert "big.json: planner exact: " in refused(capsys, "solve", tmp_path / "big.json", "--planner", "exact")


@pytest.mark.parametrize("options, message", [
    (["--planner", "nnpipr"], "--planner: 'nnpipr'; allowed: nnpiper, network, even"),
    (["--budget-ms", "0"], "--budget-ms: 0.0; allowed: over 0"),
    (["--budget-ms", "-3"], "--budget-ms: -3.0"),
    (["--budget-ms", "nan"], "--budget-ms: nan"),
    (["--budget-ms", "inf"], "--budget-ms: inf"),
    (["--budget-ms", "soon"], "--budget-ms"),
    (["--seed", "-1"], "--seed: -1; allowed: an integer from 0"),
    (["--seed", "99999999999999999999"], "--seed"),
    (["--seed", "1.5"], "--seed"),
    (["--fast"], "No such option: --fast"),
    (["--planner"], "--planner"),
])
def test_options_out_of_range_are_refused(options, message, problem_file, capsys):
    assert message in refused(capsys, "solve", problem_file, *options)


@pytest.mark.parametrize("arguments", [[], ["sovle"], ["solve"], ["simulate"], ["simulate", "a.json"], ["--fast"]])
def test_missing_and_unknown_commands(arguments, capsys):
    refused(capsys, *arguments)


def hostile(problem):
    """Texts of problem files with something wrong, and a word of the message."""
    fields = json.loads(problem.to_json())
    row = fields["forward_s"][0]
    return {
        "truncated": (problem.to_json()[:200], "Invalid JSON"),
        "empty": ("", "Invalid JSON"),
        "list": ("[]", "the file"),
        "binary": ("\x00\x01", "Invalid JSON"),
        "nested": ("[" * 100_000, "Invalid JSON"),
        "unknown field": (json.dumps(fields | {"colour": 1}), "colour"),
        "missing field": (json.dumps({k: v for k, v in fields.items() if k != "latency_s"}), "latency_s"),
        "NaN": (json.dumps(fields | {"output_bytes": [float("nan")] * 6}), "output_bytes"),
        "infinite": (json.dumps(fields | {"memory_bytes": [float("inf")] * 4}), "memory_bytes"),
        "negative": (json.dumps(fields | {"stash_bytes": [-1.0] * 6}), "stash_bytes[0]: -1"),
        "text": (json.dumps(fields | {"forward_s": "fast"}), "forward_s"),
        "null": (json.dumps(fields | {"forward_s": None}), "forward_s"),
        "too few rows": (json.dumps(fields | {"forward_s": [row] * 5}), "_s: shape"),
        "ragged": (json.dumps(fields | {"forward_s": [row] * 5 + [row[:2]]}), "forward_s"),
        "flat": (json.dumps(fields | {"forward_s": row}), "forward_s"),
        "empty array": (json.dumps(fields | {"forward_s": [], "backward_s": []}), "forward_s"),
        "more stages than devices": (json.dumps(fields | {"stages": 5}), "stages: 5; allowed: an integer"),
        "no stage": (json.dumps(fields | {"stages": 0}), "stages: 0"),
        "half a stage": (json.dumps(fields | {"stages": 1.5}), "stages"),
        "no micro-batch": (json.dumps(fields | {"micro_batches": 0}), "micro_batches: 0"),
        "unknown schedule": (json.dumps(fields | {"schedule": "chimera"}), "schedule"),
        "zero bandwidth": (json.dumps(fields | {"bandwidth_bytes_per_s": [[0.0] * 4] * 4}), "per_s[0, 1]"),
    }


def test_hostile_problem_files_are_refused_before_anything_is_solved(problem, problem_file, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    for name, (text, word) in hostile(problem).items():
        bad.write_text(text)
        line = refused(capsys, "solve", problem_file, bad, "--planner", "even", "--json")
        assert f"{bad}: " in line and word in line, name
        assert len(line) < 600, name


def test_paths_that_are_no_file(problem_file, tmp_path, capsys):
    (tmp_path / "latin.json").write_bytes(b"\xe9\xff")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "latin.json", problem_file / "below.json"):
        line = refused(capsys, "solve", path, "--planner", "even")
        assert f"{path}: cannot be read: " in line


@pytest.fixture
def strategy_file(tmp_path):
    path = tmp_path / "strategy.json"
    path.write_text('{"cuts": [2, 4], "groups": [[0], [1, 3], [2]]}')
    return path


def test_simulate(problem, problem_file, strategy_file, capsys):
    strategy = Strategy((2, 4), ((0,), (1, 3), (2,)))
    code, out, err = run(capsys, "simulate", problem_file, strategy_file, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["step_s"] == simulator.step_time(problem, strategy)
    assert answer["strategy_bound_s"] == simulator.lower_bound(problem, strategy) <= answer["step_s"]
    assert answer["groups"] == [[0], [1, 3], [2]] and len(answer["stages"]) == 3
    code, out, _ = run(capsys, "simulate", problem_file, strategy_file)
    assert code == 0 and f"step {answer['step_s']:.4g} s" in out and "2-3@1,3" in out


def test_simulate_says_what_does_not_fit(full_file, strategy_file, capsys):
    code, out, _ = run(capsys, "simulate", full_file, strategy_file)
    assert code == 3 and "GB over memory" in out
    code, out, _ = run(capsys, "simulate", full_file, strategy_file, "--json")
    assert code == 3 and json.loads(out)["feasible"] is False


def test_the_timeline_is_drawn(problem_file, strategy_file, tmp_path, capsys):
    picture = tmp_path / "out.png"
    assert run(capsys, "simulate", problem_file, strategy_file, "--timeline", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["out.gif", "out", "missing/out.png"])
def test_a_picture_that_cannot_be_written_is_refused(name, problem_file, strategy_file, tmp_path, capsys):
    assert "--timeline" in refused(capsys, "simulate", problem_file, strategy_file, "--timeline", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["problem.json", "strategy.json"]


@pytest.mark.parametrize("text", [
    '{"cuts": [2], "groups": [[0], [1], [2]]}', '{"cuts": [4, 2], "groups": [[0], [1], [2]]}',
    '{"cuts": [2, 6], "groups": [[0], [1], [2]]}', '{"cuts": [2, 4], "groups": [[0], [0], [2]]}',
    '{"cuts": [2, 4], "groups": [[0], [], [2]]}', '{"cuts": [2, 4], "groups": [[0], [1], [4]]}',
    '{"cuts": [2, 4], "groups": [[0], [1], [-1]]}', '{"cuts": [2, 4.5], "groups": [[0], [1], [2]]}',
    '{"cuts": [2, 4]}', '{"cuts": [2,', "null",
])
def test_hostile_strategies_are_refused(text, problem_file, tmp_path, capsys):
    path, picture = tmp_path / "strategy.json", tmp_path / "out.png"
    path.write_text(text)
    assert f"{path}: " in refused(capsys, "simulate", problem_file, path, "--timeline", picture)
    assert not picture.exists()


def test_train_hands_its_options_on(tmp_path, monkeypatch, capsys):
    vcta = pytest.importorskip("nnpiper.vcta")
    calls = []
    monkeypatch.setattr(vcta, "train", lambda out, recipe: calls.append((out, recipe)) or out / "nnpiper.pt")
    code, out, _ = run(capsys, "train", "--steps", 5, "--seed", 3, "--out", tmp_path / "run")
    assert code == 0 and out == f"wrote {tmp_path / 'run' / 'nnpiper.pt'}\n"
    assert calls == [(tmp_path / "run", vcta.Recipe(steps=5, seed=3))]
    for recipe in (vcta.Recipe(steps=4, groupings=6, learning_rate=1 / 3000),
                   vcta.Recipe(seed=2, start="a b/c.pt", loss="pairwise", grows=False)):
        assert run(capsys, *shlex.split(vcta.command(recipe))[1:])[0] == 0
        assert calls[-1][1] == recipe
    assert vcta.command(recipe, 2).startswith("torchrun --standalone --nproc-per-node 2 -m nnpiper.cli train ")
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "train", "--out", tmp_path / "run")[1] == ""
    (tmp_path / "file").write_text("")
    for options in (["--steps", 0], ["--steps", "many"], ["--seed", -1], ["--groupings", 1], ["--learning-rate", 0],
                    ["--loss", "ranks"], ["--out", tmp_path / "file"]):
        assert options[0] in refused(capsys, "train", *options)


def test_ablate_studies_what_it_is_asked_for(capsys, monkeypatch, tmp_path):
    from nnpiper import ablations
    calls = []
    monkeypatch.setattr(ablations, "study", lambda *arguments: calls.append(arguments))
    out = tmp_path / "out"
    assert run(capsys, "ablate", "--seconds", 3, "--seeds", 2, "--out", out)[0] == 0
    assert run(capsys, "ablate", "--out", out, *["--only", "one layer"] * 2, "--only", "blind to links")[0] == 0
    assert calls == [(out, 3.0, 2, tuple(ablations.CHANGES)), (out, 60.0, 3, ("one layer", "blind to links"))]
    (tmp_path / "file").write_text("")
    for options in (["--only", "two layers"], ["--seconds", 0], ["--seeds", 0], ["--out", tmp_path / "file"]):
        assert options[0] in refused(capsys, "ablate", *options)


def test_reproduce_is_reproduce_sh_with_its_options(monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "execvp", lambda *arguments: calls.append(arguments))
    cli.main(["reproduce", "--smoke", "--from", "03", "--help"])
    assert calls == [("bash", ["bash", str(cli.ROOT / "reproduce.sh"), "--smoke", "--from", "03", "--help"])]


def test_help_answers_within_a_second_and_loads_nothing_heavy():
    code = ("import sys; from nnpiper import cli; cli.main(['--help']); "
            "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'matplotlib', 'numpy', 'pandas')))")
    times = []
    for _ in range(3):  # the best of three: the machine may be busy with something else
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1.0


def test_an_end_of_reading_is_no_error(problem_file):
    files = " ".join([str(problem_file)] * 50)
    command = f"{sys.executable} -m nnpiper.cli solve {files} --planner even --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
