"""The runner on throwaway notebooks, reproduce.sh's options, what notebooks save with, claims, the real notebooks."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from instances import random_problem
from rich.console import Console

from nnpiper import artifact, claims, cost, plots, provenance, report, simulator
from nnpiper.paths import CHECKPOINT, FIGURES, ROOT
from nnpiper.problem import InputError, Strategy
from nnpiper.runner import NotebookError, Settings, read_chain, run_chain

PARAMETERS = 'mode = "full"\nout = "figures"\ncheckpoint = ""\nrepeats = 3'
WRITE = 'import pathlib\npathlib.Path(out).mkdir(parents=True, exist_ok=True)\npathlib.Path(out, "{}").write_text({})'


def write_notebook(root, name, *cells, reads=(), writes=(), parameters=PARAMETERS, minutes=0.1):
    """A notebook of the given code cells in root/notebooks."""
    node = nbformat.v4.new_notebook()
    node.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                     "nnpiper": {"minutes": minutes, "smoke_minutes": 0.1, "memory_gb": 0.1, "reads": list(reads),
                                 "writes": list(writes)}}
    node.cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
                  *map(nbformat.v4.new_code_cell, cells)]
    for index, cell in enumerate(node.cells):
        cell.id = f"cell-{index}"
    (root / "notebooks").mkdir(exist_ok=True)
    nbformat.write(node, root / "notebooks" / f"{name}.ipynb")


@pytest.fixture
def root(tmp_path):
    """A repository in small, in a path with the characters that tools stumble over."""
    root = tmp_path / "a {root}"
    (root / "nnpiper").mkdir(parents=True)
    (root / "nnpiper" / "core.py").write_text("")
    (root / "requirements.lock").write_text("")
    (root / "net.pt").write_text("weights")
    return root


def run(root, part=slice(None), **changes):
    """Run that part of the chain of root; returns what was printed of each notebook."""
    settings = Settings(root, root / "figures", **{"mode": "full", "checkpoint": root / "net.pt"} | changes)
    console = Console(record=True, file=open(os.devnull, "w"), width=200)
    with console.file:
        run_chain(read_chain(root / "notebooks")[part], settings, console)
    return [line.split(maxsplit=1)[1] for line in console.export_text().splitlines()]


def ran(lines):
    return ["up to date" not in line for line in lines]


def two_notebooks(root):
    write_notebook(root, "01_first", WRITE.format("a.txt", "str(repeats // 2)"), writes=["a.txt"])
    write_notebook(root, "02_second", WRITE.format("b.txt", 'pathlib.Path(out, "a.txt").read_text() + mode'),
                   reads=["{out}/a.txt"], writes=["b.txt"])


def test_only_what_changed_runs_again(root):
    two_notebooks(root)
    assert ran(run(root)) == [True, True]
    assert (root / "figures/b.txt").read_text() == "1full"
    assert ran(run(root)) == [False, False]
    # the first notebook changes, its output does not
    write_notebook(root, "01_first", WRITE.format("a.txt", "str(repeats // 2)"), writes=["a.txt"],
                   parameters=PARAMETERS.replace("3", "2"))
    assert ran(run(root)) == [True, False]
    # an output of the second is edited by hand
    (root / "figures/b.txt").write_text("better")
    assert ran(run(root)) == [False, True]
    assert (root / "figures/b.txt").read_text() == "1full"
    # an input changes
    (root / "figures/a.txt").write_text("7")
    assert ran(run(root)) == [True, False]


def test_a_run_of_one_notebook_leaves_the_others_their_provenance(root):
    two_notebooks(root)
    run(root)
    run(root, slice(1), force=True)
    assert list(json.loads((root / "figures/provenance.json").read_text())) == ["01_first", "02_second"]


def test_a_run_of_one_notebook_in_a_fresh_clone_leaves_the_others_their_provenance(root, tmp_path):
    two_notebooks(root)
    run(root)
    of_second = lambda clone: json.loads((clone / "figures/provenance.json").read_text()).get("02_second")
    clones = [shutil.copytree(root, tmp_path / name, ignore=shutil.ignore_patterns(".*")) for name in "ab"]
    (clones[1] / "figures/b.txt").write_text("better")  # of which the record says nothing
    for clone in clones:
        assert ran(run(clone, slice(1))) == [True]
    assert of_second(clones[0]) == of_second(root) and of_second(clones[1]) is None


@pytest.mark.parametrize("name", ["nnpiper/core.py", "requirements.lock", "net.pt"])
def test_a_change_to_package_lock_or_checkpoint_runs_everything(root, name):
    write_notebook(root, "01_first", WRITE.format("a.txt", "'1'"), writes=["a.txt"])
    assert ran(run(root)) == [True]
    (root / name).write_text("# changed")
    assert ran(run(root)) == [True]
    (root / "nnpiper" / "cli.py").write_text("# changes no result")
    assert ran(run(root)) == [False]


def test_force_and_a_changed_parameter(root):
    write_notebook(root, "01_first", WRITE.format("a.txt", "mode"), writes=["a.txt"])
    run(root)
    assert ran(run(root, force=True)) == [True]
    assert ran(run(root, mode="smoke")) == [True]
    assert (root / "figures/a.txt").read_text() == "smoke"


def test_a_retrained_checkpoint_is_passed_on(root):
    write_notebook(root, "01_first", WRITE.format("a.txt", "checkpoint"), writes=["a.txt"])
    run(root, shipped=False)
    assert (root / "figures/a.txt").read_text() == "net.pt"


def test_provenance_and_the_executed_notebook(root):
    write_notebook(root, "01_first", "block = bytearray(300_000_000)\nimport time; time.sleep(0.5)",
                   WRITE.format("a.txt", "'1'"), reads=["net.pt"], writes=["a.txt"])
    run(root)
    record = json.loads((root / "figures/provenance.json").read_text())["01_first"]
    assert record["parameters"] == {"mode": "full", "out": "figures", "checkpoint": "", "repeats": 3}
    assert record["commit"] == "unknown"  # the folder is in no repository
    assert 300e6 < record["peak_memory_bytes"] < 2e9
    assert 0.5 < record["wall_s"] < 60
    assert record["inputs"]["net.pt"] == provenance.hash_file(root / "net.pt")
    assert record["environment"]["packages"]["numpy"] == np.__version__
    text = (root / "figures/notebooks/01_first.ipynb").read_text()
    assert str(root) not in text and nbformat.reads(text, 4).cells[-1].execution_count


@pytest.mark.parametrize("cells, message", [
    (["1 / 0"], r"01_first: cell \[4\]: ZeroDivisionError: division by zero \(kept as "),
    (["import sys; sys.exit(0)", "pass"], "never ran"),
    (["pass"], "declared output a.txt was not written in this run"),
    (["pathlib.Path(out, 'a.txt').unlink()"], "declared output a.txt is missing"),
    (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], "kernel died.*memory.*137 and 138.*0.1 GB"),
])
def test_a_broken_notebook_counts_for_nothing(root, cells, message):
    (root / "figures").mkdir()
    (root / "figures/a.txt").write_text("from an earlier run")
    write_notebook(root, "01_first", "import pathlib", *cells, writes=["a.txt"])
    with pytest.raises(NotebookError, match=message):
        run(root)
    kept = sorted(path.name for path in (root / "figures/notebooks").iterdir())
    assert kept == ["01_first.failed.ipynb"]
    assert not (root / "figures/.stamps").exists()
    write_notebook(root, "01_first", WRITE.format("a.txt", "'1'"), writes=["a.txt"])
    assert ran(run(root)) == [True]
    assert [path.name for path in (root / "figures/notebooks").iterdir()] == ["01_first.ipynb"]


def test_the_chain_stops_at_a_failure_and_resumes_there(root):
    two_notebooks(root)
    write_notebook(root, "02_second", "1 / 0", writes=["b.txt"])
    write_notebook(root, "03_third", WRITE.format("c.txt", "'1'"), writes=["c.txt"])
    with pytest.raises(NotebookError, match="02_second"):
        run(root)
    assert not (root / "figures/c.txt").exists()
    two_notebooks(root)
    assert ran(run(root)) == [False, True, True]


def test_a_killed_run_resumes(root):
    two_notebooks(root)
    write_notebook(root, "02_second", WRITE.format("b.txt", "'half'"), "import time\ntime.sleep(120)", writes=["b.txt"])
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import pathlib; from test_artifact import run; "
            "run(pathlib.Path(sys.argv[2]))")
    process = subprocess.Popen([sys.executable, "-c", code, os.path.dirname(__file__), str(root)], cwd=ROOT)
    try:
        end = time.monotonic() + 60
        while not (root / "figures/b.txt").exists() and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (root / "figures/b.txt").read_text() == "half"
    two_notebooks(root)
    assert ran(run(root)) == [False, True]
    assert (root / "figures/b.txt").read_text() == "1full"
    assert not list((root / "figures").rglob("*.running.ipynb"))


@pytest.mark.parametrize("changes, message", [
    ({"parameters": PARAMETERS.replace("mode", "moed")}, "no parameter 'mode'; it has moed, out, checkpoint"),
    ({"parameters": PARAMETERS.replace('"full"', "1")}, "parameter mode = 'full'; allowed: the type of 1"),
    ({"parameters": PARAMETERS + "\nhalf = repeats / 2"}, "parameters cell: half = repeats / 2"),
    ({"writes": []}, "metadata.nnpiper.writes"),
    ({"writes": ["../a.txt"]}, r"writes \.\./a.txt"),
    ({"reads": ["{out}/b.txt"]}, "which no earlier notebook writes"),
    ({"reads": ["data/b.txt"]}, "reads data/b.txt: No such file"),
    ({"minutes": "3"}, "metadata.nnpiper.minutes"),
])
def test_a_wrong_declaration_is_refused(root, changes, message):
    write_notebook(root, "01_first", WRITE.format("a.txt", "'1'"), **{"writes": ["a.txt"]} | changes)
    with pytest.raises(NotebookError, match=message):
        run(root)
    assert not (root / "figures").exists()


def test_two_notebooks_with_one_number_or_one_output(root):
    write_notebook(root, "01_first", writes=["a.txt"])
    write_notebook(root, "01_other", writes=["b.txt"])
    with pytest.raises(NotebookError, match="number 01 twice"):
        read_chain(root / "notebooks")
    os.rename(root / "notebooks/01_other.ipynb", root / "notebooks/02_other.ipynb")
    write_notebook(root, "02_other", writes=["a.txt"])
    with pytest.raises(NotebookError, match="02_other: writes a.txt.*01_first"):
        read_chain(root / "notebooks")


# reproduce.sh's options

@pytest.mark.parametrize("arguments", [["--fast"], ["--smoke", "--retrain"], ["--only", "x"], ["--from"], ["05"],
                                       ["--from", "1", "--only", "2"], ["--smo"]])
def test_wrong_options_exit_with_2_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        artifact.parse(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("reproduce.sh: ")


@pytest.fixture
def repository(root, monkeypatch):
    """artifact.main on the repository in small."""
    for name, value in (("ROOT", root), ("FIGURES", root / "figures"), ("DATA", root / "data"),
                        ("NOTEBOOKS", root / "notebooks"), ("CHECKPOINT", root / "net.pt")):
        monkeypatch.setattr(artifact, name, value)
    (root / "data").mkdir()
    return root


def claim(name="C1", low=10.0, high=None, expected=claims.HOLDS, **more):
    return {"id": name, "statement": "improves 10 % on average", "source": "preprint", "measure": "mean gain",
            "unit": "%", "paper_low": low, "paper_high": high, "tolerance": 1.0, "tolerance_reason": "other models",
            "expected_verdict": expected, "notebook": "01", "command": "./reproduce.sh --only 01"} | more


def claiming(root, number, expected=claims.HOLDS):
    """A repository whose one notebook makes one claim."""
    listed = [claim(expected=expected)]
    (root / "data/claims.json").write_text(json.dumps({"claims": listed}))
    judged = claims.judge_all(claims.read_claims(root / "data/claims.json"), {"C1": (number, "")})
    write_notebook(root, "01_first", WRITE.format("claims.json", repr(claims.to_json(judged))),
                   WRITE.format("claims.md", "'| claims |'"), writes=["claims.json", "claims.md"], minutes=4)


def test_main_announces_runs_and_prints_the_claims(repository, capsys):
    claiming(repository, 12.0)
    assert artifact.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 1 notebooks to run into figures/: about 4 minutes on two cores, 0.1 GB")
    row = next(line for line in out.splitlines() if "C1" in line)
    assert row.split() == ["C1", "mean", "gain", "at", "least", "10", "%", "12", "%", "holds"]
    assert artifact.main([]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 notebooks to run into figures/: about 0 minutes")


def test_a_verdict_off_the_record_breaks_the_check_of_a_full_run_alone(repository, capsys):
    claiming(repository, 8.0)  # under 10 - 1
    assert artifact.main(["--smoke"]) == 0
    assert artifact.main([]) == 1
    assert "check broken: claim C1: verdict 'does not hold' (number 8), on record is 'holds'" in capsys.readouterr().err
    claiming(repository, 8.0, claims.FAILS)
    assert artifact.main([]) == 0  # an honest "does not hold" breaks nothing


def test_main_fails_with_the_notebook_and_leaves_full_results_to_smoke_alone(repository, capsys):
    write_notebook(repository, "01_first", WRITE.format("a.txt", "mode"), writes=["a.txt"])
    assert artifact.main([]) == 0
    assert artifact.main(["--smoke"]) == 0
    assert (repository / "figures/a.txt").read_text() == "full"
    assert (repository / "figures/smoke/a.txt").read_text() == "smoke"
    assert artifact.main(["--clean"]) == 0
    assert [path.name for path in (repository / "figures").iterdir()] == ["smoke"]
    write_notebook(repository, "01_first", "1 / 0", writes=["a.txt"])
    assert artifact.main([]) == 1
    assert "reproduce.sh: 01_first: cell [3]: ZeroDivisionError" in capsys.readouterr().err


def test_from_and_only_choose_notebooks(repository, capsys):
    two_notebooks(repository)
    assert artifact.main(["--only", "3"]) == 2
    assert "notebook 03; allowed: 01 to 02" in capsys.readouterr().err
    assert artifact.main(["--from", "02"]) == 1  # what it reads is not there
    assert "02_second: reads {out}/a.txt: No such file or directory; run the chain from its start" in \
        capsys.readouterr().err
    assert artifact.main(["--only", "01"]) == 0
    assert not (repository / "figures/b.txt").exists()
    assert artifact.main(["--from", "02"]) == 0
    assert (repository / "figures/b.txt").exists()


def test_ctrl_c_ends_with_130_and_no_kernel_left(root):
    import psutil

    write_notebook(root, "01_first", WRITE.format("pid.txt", "str(__import__('os').getpid())"),
                   "import time\ntime.sleep(120)", writes=["pid.txt"])
    # the tests may run as a shell's background job, whose children ignore ctrl-c
    code = ("import signal, sys, pathlib; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from nnpiper import artifact; root = pathlib.Path(sys.argv[1]); "
            "artifact.ROOT = root; artifact.FIGURES = root / 'figures'; artifact.NOTEBOOKS = root / 'notebooks'; "
            "artifact.CHECKPOINT = root / 'net.pt'; sys.exit(artifact.main([]))")
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pid, end = root / "figures/pid.txt", time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and errors == "interrupted; the next run goes on from here\n"
    end = time.monotonic() + 20
    while psutil.pid_exists(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_two_runs_at_once_are_refused(repository, capsys):
    import fcntl

    (repository / "figures").mkdir()
    with open(repository / "figures/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert artifact.main([]) == 2
    assert capsys.readouterr().err == "reproduce.sh: figures: another run is writing here; allowed: one at a time\n"


def test_retraining_repeats_the_cards_command_and_starts_anew_when_the_source_changes(repository, monkeypatch):
    monkeypatch.setattr(artifact, "TRAINING_MODULES", ("core",))
    (repository / "net.json").write_text(json.dumps(
        {"command": "torchrun --nproc-per-node 2 -m nnpiper.cli train --seed 3", "minutes": 30}))
    commands = []

    def train(command, env, **_):
        assert env["OMP_NUM_THREADS"] == "1"
        commands.append(command)
        folder = command[-1]
        (folder / "net.pt").write_text(f"weights {len(list(folder.iterdir()))}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(artifact.subprocess, "run", train)
    out = repository / "figures/retrain"
    target = artifact.train_checkpoint(out)
    words = "--nproc-per-node 2 -m nnpiper.cli train --seed 3 --out".split()
    assert commands == [[Path(sys.executable).parent / "torchrun", *words, out / "checkpoint"]]
    assert target.read_text() == "weights 1"
    assert artifact.train_checkpoint(out).read_text() == "weights 2"  # resumed: what was there is still there
    (repository / "nnpiper/core.py").write_text("# changed")
    assert artifact.train_checkpoint(out).read_text() == "weights 1"


def test_training_modules_are_what_training_imports_and_the_options_need_no_package():
    imported, todo = set(), ["vcta"]
    while todo:
        imported.add(name := todo.pop())
        found = [node for node in ast.walk(ast.parse((ROOT / "nnpiper" / f"{name}.py").read_text()))
                 if isinstance(node, ast.ImportFrom) and node.level == 1]
        todo += {other for node in found for other in ([node.module] if node.module else [a.name for a in node.names])
                 if (ROOT / "nnpiper" / f"{other}.py").is_file()} - imported
    assert sorted(imported) == sorted(artifact.TRAINING_MODULES)
    code = ("import sys; from nnpiper import artifact, provenance; artifact.parse(['--smoke']); "
            "sys.exit('numpy' in sys.modules or 'pydantic' in sys.modules)")
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)  # -S: no site-packages at all


def test_usable_cores_heed_the_quota(monkeypatch):
    cores = provenance.usable_cores()
    assert 1 <= cores <= os.cpu_count()
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000\n"}
    monkeypatch.setattr(provenance, "_text", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert provenance.usable_cores() == 1
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert provenance.usable_cores() == 8
    files = {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    assert provenance.usable_cores() == 3
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    assert provenance.usable_cores() == 8


def test_commit_of_a_repository_a_dirty_one_and_a_folder_inside_one(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/a.csv").write_text("1")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert provenance.commit(tmp_path) == {"commit": head, "dirty": False}
    assert provenance.commit(tmp_path / "figures") == {"commit": "unknown", "dirty": None}
    (tmp_path / "source.py").write_text("")
    assert provenance.commit(tmp_path) == {"commit": head, "dirty": True}


# what notebooks save with

@pytest.mark.parametrize("arguments", [("ful", "figures", ""), ("smoke", "figures", ""), ("full", "figures", "x.pt"),
                                       ("full", 1, ""), ("full", "", "")])
def test_open_notebook_refuses(arguments):
    with pytest.raises(InputError, match="allowed"):
        report.open_notebook(*arguments)


def test_open_notebook_writes_to_the_same_place_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.delenv(report.RUNNER_PREFIX, raising=False)
    monkeypatch.chdir(tmp_path)
    with plt.rc_context():
        assert report.open_notebook("full", "figures", "") == report.Run(FIGURES, False, CHECKPOINT)
        assert report.open_notebook("smoke", "figures/smoke", "") == report.Run(FIGURES / "smoke", True, CHECKPOINT)
        monkeypatch.setenv(report.RUNNER_PREFIX, "/elsewhere")
        with pytest.raises(InputError, match="kernel: runs in .*; allowed: the runner's environment /elsewhere"):
            report.open_notebook("full", "figures", "")


def test_tables_say_the_same_in_three_formats(tmp_path):
    table = pd.DataFrame({"plan|er": ["0-6@3 | 7@1", "50 % & more_"], "gap": [0.1 + 0.2, float("nan")], "n": [3, 40]})
    report.Run(tmp_path, False, CHECKPOINT).save_table(table, "gaps")
    assert (tmp_path / "tables/gaps.csv").read_text() == "plan|er,gap,n\n0-6@3 | 7@1,0.3,3\n50 % & more_,,40\n"
    head, rule, *rows = (tmp_path / "tables/gaps.md").read_text().splitlines()
    assert head.split() == ["|", r"plan\|er", "|", "gap", "|", "n", "|"] and rule.count(":") == 3
    assert rows[0].split(" | ")[0].strip() == r"| 0-6@3 \| 7@1"
    tex = (tmp_path / "tables/gaps.tex").read_text()
    assert r"50 \% \& more\_ &  & 40 \\" in tex and r"\begin{tabular}{lrr}" in tex


def test_named_index_levels_become_columns(tmp_path):
    table = pd.DataFrame({"model": ["a", "a", "b"], "step": [1.0, 2.0, 3.0]}).groupby("model").mean()
    assert report.csv_text(table) == "model,step\na,1.5\nb,3\n"


def test_figures_are_equal_byte_for_byte_and_carry_their_data(tmp_path):
    def draw(folder):
        with plt.rc_context():
            plots.style()
            figure, axes = plt.subplots()
            axes.plot([1, 2], [3, 4])
            picture = report.Run(folder, False, CHECKPOINT).save_figure(figure, "line", pd.DataFrame({"x": [1, 2]}))
        assert not plt.get_fignums() and picture.data == (folder / "line.png").read_bytes()
        return [(folder / f"line.{kind}").read_bytes() for kind in ("pdf", "png", "csv")]

    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert first == second and first[2] == b"x\n1\n2\n"
    assert b"/Type3" not in first[0] and b"CreationDate" not in first[0]


def test_wall_times_lie_apart(tmp_path):
    run = report.Run(tmp_path, False, CHECKPOINT)
    run.save_timing(pd.DataFrame({"ms": [1.0]}), "solve")
    figure, _ = plt.subplots()
    run.save_figure(figure, "solve_plot", pd.DataFrame({"ms": [1.0]}), wall_times=True)
    assert {path.parent.name for path in tmp_path.rglob("*.*")} == {"timings"}


def test_progress_is_sparse_under_the_runner(monkeypatch, capsys):
    monkeypatch.setenv(report.RUNNER_PREFIX, sys.prefix)
    assert list(report.progress(range(100), "problems")) == list(range(100))
    assert capsys.readouterr().out.splitlines() == [f"problems: {n} of 100" for n in (25, 50, 75, 100)]
    assert list(report.progress(iter([]), "none", total=0)) == []


@pytest.mark.parametrize("transfers", ["blocking", "overlapped"])
def test_the_timeline_ends_with_the_step_and_shows_every_operation(transfers):
    problem = random_problem(np.random.default_rng(3), K=5, L=9, S=3, M=4, schedule="1f1b", transfers=transfers)
    strategy = Strategy((3, 6), ((0, 1), (2,), (3, 4)))
    step = simulator.timeline(problem, strategy)
    assert (cost.stage_arrays(problem, strategy).all_reduce_s > 0).tolist() == [True, False, True]
    with plt.rc_context():
        figure = plots.timeline_figure(step, transfers, ["a", "b", "c"])
        axes = figure.axes[0]
        edges = [path.vertices[:, 0] for bars in axes.collections for path in bars.get_paths()]
        scale = axes.get_xlim()[1] / step.step_s
        assert max(x.max() for x in edges) == pytest.approx(step.step_s * scale)
        assert min(x.min() for x in edges) == 0
        # M F's and B's a stage, their transfers over both boundaries, the all-reduces
        assert len(edges) == 2 * 3 * 4 + 2 * 2 * 4 + (step.all_reduce_s > 0).sum()
        # numbers stand in those rows alone whose operations are wide enough, 0 .. M - 1 in each
        numbers = [text.get_text() for text in axes.texts]
        assert numbers and numbers == ["0", "1", "2", "3"] * (len(numbers) // 4)
        plt.close(figure)


# claims

def test_verdicts():
    def verdict(number, **bounds):
        return claims.judge(claims.Claim(**claim(**bounds)), number).verdict

    assert [verdict(x) for x in (8.9, 9.0, 99.0)] == [claims.FAILS, claims.HOLDS, claims.HOLDS]
    assert [verdict(x, low=None, high=10.0) for x in (-5, 11.0, 11.1)] == [claims.HOLDS, claims.HOLDS, claims.FAILS]
    assert [verdict(x, low=16, high=25) for x in (14.9, 15.0, 26.0, 26.1)] == [claims.FAILS, claims.HOLDS, claims.HOLDS,
                                                                               claims.FAILS]
    assert verdict(None, low=None, expected=claims.UNTESTABLE) == claims.UNTESTABLE
    for number in (None, float("nan"), float("inf")):
        with pytest.raises(InputError, match="claim C1: number .*; allowed: a finite number"):
            verdict(number)


def test_numbers_must_belong_to_the_claims(tmp_path):
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"claims": [claim(), claim("C2", low=None, expected=claims.UNTESTABLE)]}))
    listed = claims.read_claims(path)
    assert [j.verdict for j in claims.judge_all(listed, {"C1": (12.0, "")})] == [claims.HOLDS, claims.UNTESTABLE]
    for numbers in ({}, {"C1": (12.0, ""), "C3": (1.0, "")}, {"C1": (12.0, ""), "C2": (1.0, "")}):
        with pytest.raises(InputError, match="claim"):
            claims.judge_all(listed, numbers)


@pytest.mark.parametrize("wrong", [{"low": None}, {"expected": claims.UNTESTABLE}, {"low": 3.0, "high": 2.0},
                                   {"tolerance": -1.0}, {"tolerance_reason": ""}, {"expected": "maybe"}, {"more": 1}])
def test_inconsistent_claims_are_refused(tmp_path, wrong):
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"claims": [claim(**wrong)]}))
    with pytest.raises(InputError, match="claims.0"):
        claims.read_claims(path)


@pytest.mark.parametrize("row, broken", [
    ({"id": "C1", "number": 12.0, "verdict": claims.HOLDS}, []),
    ({"id": "C2", "number": 12.0, "verdict": claims.HOLDS}, ["claim C1: absent from claims.json"]),
    ({"id": "C1", "number": None, "verdict": claims.HOLDS}, ["claim C1: number None; allowed: a finite number"]),
    ({"id": "C1", "number": 5.0, "verdict": claims.HOLDS}, ["claim C1: verdict 'holds' does not follow from 5.0"]),
    ({"id": "C1", "number": 5.0, "verdict": claims.FAILS},
     ["claim C1: verdict 'does not hold' (number 5), on record is 'holds'"]),
])
def test_broken_checks(tmp_path, row, broken):
    path = tmp_path / "claims.json"
    path.write_text(json.dumps([row]))
    assert claims.broken_checks([claims.Claim(**claim())], path, compare_verdicts=True) == broken


def test_saved_claims_pass_their_check_and_wall_times_lie_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DATA", tmp_path)
    listed = [claim(), claim("C2", low=None, high=36.0, unit="ms", wall_time=True),
              claim("C3", low=None, expected=claims.UNTESTABLE, tolerance_reason="no real cluster")]
    (tmp_path / "claims.json").write_text(json.dumps({"claims": listed}))
    out = tmp_path / "out"
    report.Run(out, False, CHECKPOINT).save_claims({"C1": (12.345, "95 % CI 12 to 13"), "C2": (20.5, "")})
    assert claims.broken_checks(claims.read_claims(tmp_path / "claims.json"), out / "claims.json", True) == []
    text = (out / "claims.md").read_text()
    assert all(part in text for part in ("12.35 % (95 % CI 12 to 13)", "20.5 ms", "at most 36 ms", "no real cluster"))
    apart = (out / "tables/claims.csv").read_text()
    assert "20.5" not in apart and "see timings/claims" in apart
    assert "20.5 ms" in (out / "timings/claims.csv").read_text()


# the repository's own notebooks

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.skipif(not NOTEBOOKS, reason="notebooks/ is still empty")
def test_the_notebooks_declarations_fit_together():
    chain = read_chain(ROOT / "notebooks")
    assert [notebook.number for notebook in chain] == [f"{n:02d}" for n in range(1, len(chain) + 1)]
    assert sum("claims.json" in notebook.says.writes for notebook in chain) == 1
    for notebook in chain:
        for name in notebook.says.reads:
            assert name.startswith(("{out}/", "{checkpoint}/")) or (ROOT / name).is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_clean(path):
    node = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(node)
    assert (node.nbformat, node.nbformat_minor) == (4, 5)
    assert node.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in node.cells]
    assert len(set(ids)) == len(ids)
    for cell in node.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert "sys.exit" not in cell.source and "exit()" not in cell.source
    parameters, = [cell for cell in node.cells if "parameters" in cell.metadata.get("tags", [])]
    values = {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(parameters.source).body}
    assert values | {"mode": "full", "out": "figures", "checkpoint": ""} == values
