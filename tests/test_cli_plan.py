"""The commands plan, compare, export and profile: exit codes, files written whole or not at all, output that stays
readable, hostile input refused with one line.
"""

import html.parser
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from command_line import refused, run
from instances import random_problem

from nnpiper import cli, comparison, plan_file, plan_report, planning, simulator
from nnpiper.cluster import Cluster
from nnpiper.paths import DATA
from nnpiper.problem import InputError, Problem, Strategy

LAB = DATA / "clusters" / "lab.toml"
GPT2 = ("--model", "gpt2", "--micro-batches", 8)
NASTY = ['</script><script>alert("1")</script>', "$x_{$ & <b>", "名前 ñ 🚀", "a" * 60]


@pytest.fixture
def nasty():
    """A plan on a cluster whose names try to break out; cluster files allow less."""
    links = np.full((4, 4), 5e9)
    names = {"labels": [f"{name}!" for name in NASTY], "titles": NASTY, "node_names": NASTY}
    cluster = Cluster(NASTY, np.full(4, 5e13), np.full(4, 4e10), links, np.zeros((4, 4)), np.arange(4), **names)
    return planning.plan(cluster, planning.Request("gpt2", 8, stages=4))


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(random_problem(np.random.default_rng(5), K=3, L=6, S=2, M=4, schedule="1f1b").to_json())
    return path


# plan


def test_plan_for_people(capsys):
    code, out, err = run(capsys, "plan", LAB, "--model", "gpt2-xl", "--micro-batches", 32, "--schedule", "1f1b")
    assert (code, err) == (0, "")
    assert out.startswith("gpt2-xl on 4 devices: ") and "32 micro-batches of 1 x 1024 tokens, 1f1b, blocking" in out
    for text in ("gpu1 (RTX 3090)", "gpu3 (RTX 2080 Ti)", "samples/s", "tokens/s", "bubble", "bottleneck: stage ",
                 "an even split over"):
        assert text in out, text


def test_plan_json_and_out_are_the_same_plan_file_which_python_gives_too(tmp_path, capsys):
    path = tmp_path / "folder" / "plan.json"
    options = ("--stages", 2, "--transfers", "overlapped", "--pin", "head=gpu2", "--max-devices", 3,
               "--micro-batch-size", 2, "--sequence-length", 512, "--recompute", "--seed", 4)
    code, out, err = run(capsys, "plan", LAB, *GPT2, *options, "--json", "--out", path)
    assert (code, err) == (0, "") and path.read_text() == out
    written = plan_file.read(path)
    from nnpiper import cluster_file
    request = planning.Request("gpt2", 8, 2, None, 2, 512, "overlapped", True, {"head": "gpu2"}, 3)
    assert planning.plan(cluster_file.load(LAB), request, seed=4).to_file() == written
    assert written.groups[-1] == [2] and written.recompute and written.sequence_length == 512
    assert sum(map(len, written.groups)) <= 3 and not list(tmp_path.rglob("*.tmp"))


def test_objective_latency(capsys):
    options = ("plan", LAB, *GPT2, "--micro-batch-size", 8, "--json")
    fast, short = (json.loads(run(capsys, *options, "--objective", objective)[1])
                   for objective in ("throughput", "latency"))
    assert short["figures"]["latency_s"] <= fast["figures"]["latency_s"] and fast["step_s"] <= short["step_s"]


def test_what_does_not_fit_exits_with_3_and_writes_nothing(tmp_path, capsys):
    plan_path, report = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ("plan", LAB, "--model", "gpt2-xl", "--micro-batches", 16, "--stages", 1, "--out", plan_path,
               "--report", report)
    code, out, err = run(capsys, *options)
    assert code == 3 and err.count("not written") == 2
    assert "DOES NOT FIT" in out and re.search(r"stage 0 on gpu[01] \(RTX 3090\) is short by [\d.]+ GB", out)
    assert "advice: another number of stages would make it fit" in out
    code, out, err = run(capsys, *options, "--json")
    answer = json.loads(out)
    assert code == 3 and answer["feasible"] is False and answer["short"][0]["bytes"] > 1e9 and answer["advice"]
    assert list(tmp_path.iterdir()) == []


class Page(html.parser.HTMLParser):
    """Checks that tags nest and nothing is fetched; keeps the tags and the text."""

    VOID = {"meta", "link", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "srcset", "onload", "action") and not name.startswith("on")
            assert not name.endswith("href") or value.startswith("#"), value

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_page_that_escapes_names(nasty):
    text = plan_report.page(nasty)
    page = Page(text)
    assert "script" not in page.tags and page.tags.count("svg") == 1 and page.tags.count("table") == 1
    assert "url(http" not in text and "@import" not in text
    assert all(f"{name}! ({name})" in page.text for name in NASTY)
    for word in ("bottleneck", "samples/s", "one step: ", "memory [GB]", "forward", "backward"):
        assert word in page.text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and plan_report.page(nasty) == text


def test_a_report_of_very_many_micro_batches_draws_a_part_and_says_so(capsys, tmp_path):
    report = tmp_path / "folder" / "plan.html"
    code, out, err = run(capsys, "plan", LAB, "--model", "gpt2", "--micro-batches", 65536, "--stages", 2,
                         "--schedule", "1f1b", "--report", report)
    assert (code, err) == (0, "") and "step " in out and not list(tmp_path.rglob("*.tmp"))
    assert "drawn without 61440 of its 65536 micro-batches" in Page(report.read_text()).text
    assert report.stat().st_size < 1e7


def test_names_that_cannot_be_printed_become_question_marks():
    assert plan_report.printable("a\x1b[31mb\x00\ud800é") == "a?[31mb??é"


def test_piped_output_is_never_cut_and_a_narrow_terminal_breaks_cells(nasty, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    piped = io.StringIO()
    plan_report.print_plan(nasty, piped)
    assert all(f"{name}! ({name})" in piped.getvalue() for name in NASTY) and "…" not in piped.getvalue()
    monkeypatch.setenv("FORCE_COLOR", "1")
    narrow = io.StringIO()
    plan_report.print_table(["stage", "devices", "time"], [[str(s), 60 * "abc"[s], "1.5"] for s in range(3)], 2, narrow)
    lines = re.sub(r"\x1b\[[\d;]*m", "", narrow.getvalue()).splitlines()
    assert max(map(len, lines)) <= 50 and "…" not in narrow.getvalue()
    assert [sum(line.count(letter) for line in lines[3:]) for letter in "abc"] == [60, 60, 60]


@pytest.mark.parametrize("options, message", [
    (["--model", "gpt3-xl", "--micro-batches", 8], "model: 'gpt3-xl' (did you mean 'gpt"),
    ([*GPT2, "--stages", "many"], "--stages: 'many'; allowed: an integer from 1, or auto"),
    ([*GPT2, "--stages", "-1"], "--stages: '-1'"),
    ([*GPT2, "--stages", "0"], "stages: 0; allowed: an integer from 1 to 4"),
    ([*GPT2, "--stages", "5"], "stages: 5; allowed: an integer from 1 to 4"),
    ([*GPT2, "--stages", "²"], "--stages: '²'"),
    ([*GPT2, "--schedule", "zb"], "schedule: 'zb'; allowed: 1f1b, gpipe"),
    ([*GPT2, "--micro-batch-size", "0"], "micro_batch_size: 0"),
    ([*GPT2, "--sequence-length", "99999"], "sequence_length: 99999; allowed: an integer from 1 to 1024"),
    ([*GPT2, "--max-devices", "9"], "max_devices: 9; allowed: an integer from 1 to 4"),
    ([*GPT2, "--objective", "cheap"], "objective: 'cheap'"),
    ([*GPT2, "--pin", "head"], "--pin: 'head'; allowed: LAYER=DEVICE"),
    ([*GPT2, "--pin", "=gpu0"], "--pin: '=gpu0'"),
    ([*GPT2, "--pin", "head=gpu0", "--pin", "head=gpu1"], "--pin: 'head=gpu1'; allowed: LAYER=DEVICE, each layer once"),
    ([*GPT2, "--pin", "haed=gpu0"], "pins: layer 'haed' (did you mean 'head'?)"),
    ([*GPT2, "--pin", "head=gpu"], "pins: device 'gpu' (did you mean 'gpu"),
    ([*GPT2, "--seed", "-1"], "--seed: -1"),
    ([*GPT2, "--out", "."], "--out: .; allowed: a file"),
    ([*GPT2, "--report", "."], "--report: .; allowed: a file"),
    ([*GPT2, "--report", "same", "--out", "same"], "--report: same; allowed: a file of its own"),
    (["--model", "gpt2", "--micro-batches", "0"], "micro_batches: 0"),
    (["--model", "gpt2", "--micro-batches", "x"], "'--micro-batches'"),
    (["--model", "gpt2"], "--micro-batches"),
    (["--micro-batches", 8], "--model"),
])
def test_options_of_plan_that_are_refused(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "plan", LAB, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, text", [("a.toml", "devices = ["), ("a.json", "{"), ("a.json", "[]"), ("a.toml", ""),
                                        ("a.json", '{"devices": []}'), ("a.toml", "\x00")])
def test_cluster_files_that_are_refused(name, text, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert f"{path}: " in refused(capsys, "plan", path, *GPT2)


def test_paths_that_are_no_file(tmp_path, capsys):
    for command in (["plan", tmp_path, *GPT2], ["plan", tmp_path / "missing.toml", *GPT2],
                    ["compare", tmp_path], ["compare", tmp_path / "missing.json"],
                    ["export", tmp_path, "--to", "json"], ["export", tmp_path / "missing.json", "--to", "json"]):
        assert str(command[1]) in refused(capsys, *command)


def test_a_file_that_cannot_be_written_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "plan", LAB, *GPT2, "--out", tmp_path / "file" / "plan.json")
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err


def test_a_terminal_without_unicode(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text('devices = [{device = "名前", achieved_TFLOPS = 50, memory_GB = 40}]', encoding="utf-8")
    for target in (path, tmp_path / "名.toml"):
        done = subprocess.run([sys.executable, "-m", "nnpiper.cli", "plan", target, *map(str, GPT2)], text=True,
                              env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True)
        assert done.returncode == (0 if target == path else 2) and "Traceback" not in done.stderr
        assert "\\u540d" in done.stdout + done.stderr


# compare


def test_compare_lists_every_planner_on_a_problem_file(small_file, capsys):
    from nnpiper.baselines import PLANNERS

    code, out, err = run(capsys, "compare", small_file, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and {row["planner"] for row in rows} == {"nnpiper", *PLANNERS}
    problem = Problem.from_file(small_file)
    for row in rows:
        strategy = Strategy(tuple(row["cuts"]), tuple(map(tuple, row["groups"])))
        assert row["step_s"] == simulator.step_time(problem, strategy) and row["feasible"] and row["note"] == ""
        assert row["solve_s"] > 0
    steps = [row["step_s"] for row in rows]
    assert steps == sorted(steps) and rows[0]["gap"] == 0.0
    assert [row["gap"] for row in rows] == pytest.approx([step / steps[0] - 1 for step in steps])
    assert next(row for row in rows if row["planner"] == "exact")["step_s"] == pytest.approx(steps[0])


def test_compare_on_a_cluster_shows_limits_and_missing_memory(capsys):
    code, out, err = run(capsys, "compare", LAB, "--model", "gpt2-xl", "--micro-batches", 16, "--time-limit", 10)
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()[3:] if line.strip()}
    assert set(cli.PLANNERS) - {"network"} <= set(lines)
    assert " fits " in lines["nnpiper"] and re.search(r"[\d.]+ [GM]B over", lines["even"])
    assert out.startswith(f"gpt2-xl on {LAB}: 4 stages, 16 micro-batches, ")


def test_compiling_does_not_count(tmp_path, monkeypatch):
    """In a process with no compiled code at hand, where compiling takes seconds, a small problem takes little."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (row,) = comparison._run(random_problem(np.random.default_rng(5), K=4, L=6, S=3, M=4), ["pipedream"], 60.0, 0)
    assert row["solve_s"] < 0.3


def test_a_planner_beyond_its_size_or_time_does_not_hold_up_the_others():
    problem = random_problem(np.random.default_rng(1), K=40, L=40, S=8, M=4)
    rows = comparison._run(problem, ["exact", "anneal", "even"], 0.01, 0)
    assert [row["planner"] for row in rows] == ["exact", "anneal"]
    assert rows[0]["note"].startswith("not applicable: ") and rows[1]["note"] == "stopped after 0.01 s"
    (row,) = comparison._run(problem, ["even"], 10.0, 0)
    row["strategy"].check(problem)


@pytest.mark.parametrize("arguments, message", [
    (["compare", LAB], "--model is missing; allowed"),
    (["compare", LAB, "--stages", 2], "--model is missing beside --stages"),
    (["compare", LAB, "--model", "gpt2"], "--micro-batches is missing"),
    (["compare", LAB, *GPT2, "--stages", 9], "stages: 9"),
    (["compare", LAB, *GPT2, "--stages", 2, "--time-limit", 0], "limit_s: 0"),
    (["compare", LAB, *GPT2, "--stages", 2, "--time-limit", "nan"], "limit_s: nan"),
    (["compare", LAB, *GPT2, "--pin", "0=gpu0"], "No such option: --pin"),
])
def test_options_of_compare_that_are_refused(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


# export, profile


@pytest.fixture
def plan_path(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert run(capsys, "plan", LAB, *GPT2, "--stages", 4, "--schedule", "1f1b", "--out", path)[0] == 0
    return path


def test_export_prints_or_writes_what_export_gives(plan_path, tmp_path, capsys):
    exports = pytest.importorskip("nnpiper.export")
    out_path, written = tmp_path / "out.txt", 0
    for target in exports.TARGETS:
        try:
            text = exports.export(plan_file.read(plan_path), target)
        except InputError as error:
            assert str(error) in refused(capsys, "export", plan_path, "--to", target, "--out", out_path)
            assert not out_path.exists()
            continue
        code, out, err = run(capsys, "export", plan_path, "--to", target)
        assert (code, out.rstrip("\n"), err) == (0, text.rstrip("\n"), "")
        code, out, _ = run(capsys, "export", plan_path, "--to", target, "--out", out_path)
        assert (code, out, out_path.read_text()) == (0, "", text)
        out_path.unlink()
        written += 1
    assert written >= 5


def test_export_refuses_in_one_line(plan_path, tmp_path, capsys):
    assert "'megatronn'; allowed: megatron, " in refused(capsys, "export", plan_path, "--to", "megatronn")
    fields = json.loads(plan_path.read_text())
    (tmp_path / "bad.json").write_text(json.dumps(fields | {"cuts": [1, 1, 1]}))
    assert "bad.json: " in refused(capsys, "export", tmp_path / "bad.json", "--to", "json")


def test_profile_hands_its_options_on_and_writes_a_whole_file(tmp_path, monkeypatch, capsys):
    profiling = pytest.importorskip("nnpiper.profiling")
    calls = []

    class Measured:
        def to_json(self):
            return "{}\n"

    def measure(*arguments, progress):
        calls.append(arguments)
        progress("block")
        return Measured()

    monkeypatch.setattr(profiling, "measure", measure)
    out = tmp_path / "gpu.json"
    code, printed, err = run(capsys, "profile", "--model", "gpt2", "--out", out, "--micro-batch-size", 2,
                             "--sequence-length", 64, "--recompute", "--device", "cuda:1")
    assert (code, printed, err) == (0, f"wrote {out}\n", "measuring block\n") and out.read_text() == "{}\n"
    assert calls == [("gpt2", 2, 64, True, "cuda:1")]

    def refuse(*arguments, progress):
        raise InputError("device: 'tpu'; allowed: cpu, cuda")

    monkeypatch.setattr(profiling, "measure", refuse)
    assert "device: 'tpu'" in refused(capsys, "profile", "--model", "gpt2", "--out", tmp_path / "b.json")
    assert "--out" in refused(capsys, "profile", "--model", "gpt2", "--out", tmp_path)
    assert list(tmp_path.iterdir()) == [out]
