"""The README's section on a user's own cluster: every command and every line of Python runs, from a folder with nothing
in it but data/, and the numbers it states are those that come out.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from export_parsers import megatron_layout

from nnpiper import cluster_file, plan_file
from nnpiper.paths import DATA, ROOT

SECTION = re.search(r"^## Plan your own cluster\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"),
                    re.M | re.S)[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """{command: its stdout}, run one after the other in a folder; and the folder."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "data").symlink_to(DATA)
    outputs = {}
    for line in COMMANDS:
        command, _, comment = line.partition("  # exit code ")
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/nnpiper"
        script = Path(sys.executable).with_name("nnpiper")
        assert script.is_file(), "the package is not installed"
        done = subprocess.run([script, *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == int(comment or 0), f"{line}\n{done.stderr}"
        outputs[command] = done.stdout
    return outputs, folder


def stdout_of(ran, words):
    found, = [text for command, text in ran[0].items() if words in command]
    return found


def test_the_section_has_what_is_checked():
    assert [kind for kind, _ in BLOCKS] == ["toml", "bash", "bash", "text", "bash", "python"] and len(COMMANDS) == 5


def test_the_cluster_is_the_file_that_the_commands_name():
    shown = cluster_file.build(tomllib.loads(blocks("toml")[0]))
    filed = cluster_file.load(DATA / "clusters" / "lab.toml")
    assert shown.titles == filed.titles and shown.node_names == filed.node_names
    assert shown.memory_bytes.tolist() == filed.memory_bytes.tolist()
    assert shown.bandwidth_bytes_per_s.tolist() == filed.bandwidth_bytes_per_s.tolist()


def test_the_numbers_of_the_plan(ran):
    """Searching makes the same moves on every machine, but the last digits of a step may lead it elsewhere."""
    plan = plan_file.read(ran[1] / "plan.json")
    stated = float(re.search(r"Expect a step of ([\d.]+) s", SECTION)[1])
    assert plan.step_s == pytest.approx(stated, rel=0.01)
    assert f"step {plan.step_s:.4g} s" in stdout_of(ran, "--out plan.json")
    assert "an even split over 4 stages (equal layer counts, devices in file order) does not fit into memory" in stdout_of(ran, "--out plan.json")
    page = (ran[1] / "plan.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "one step: " in page


def test_the_flags(ran):
    """As printed; the layout nearly so."""
    shown, = blocks("text")
    printed = stdout_of(ran, "--to megatron")
    layout = re.compile(r'(?<=--pipeline-model-parallel-layout ")[^"]+')
    assert layout.sub("", shown) in layout.sub("", printed)
    stated, made = ([stage.count("t") for stage, in megatron_layout(layout.search(text)[0], 4)]
                    for text in (shown, printed))
    assert sum(stated) == sum(made) == 48 and max(abs(a - b) for a, b in zip(stated, made)) <= 2
    assert "torchrun" in printed and "CUDA_VISIBLE_DEVICES" in printed


def test_the_targets_are_those_there_are():
    from nnpiper.export import TARGETS
    named = re.search(r"Other targets: (.*?);", SECTION, re.S)[1]
    assert {"megatron", *re.findall(r"`([\w.]+)`", named)} == set(TARGETS)


def test_the_other_commands_print_what_is_said(ran):
    from nnpiper.baselines import PLANNERS
    planners = {line.split()[0] for line in stdout_of(ran, " compare ").splitlines()[4:] if line.strip()}
    assert planners == {"nnpiper", *PLANNERS}
    assert re.search(r"stage 0 on gpu[01] \(RTX 3090\) is short by [\d.]+ GB", stdout_of(ran, "--stages 1"))
    assert "advice: another number of stages would make it fit" in stdout_of(ran, "--stages 1")
    measured = json.loads((ran[1] / "my_gpu.json").read_text(encoding="utf-8"))
    assert set(measured["kinds"]) == {"embedding", "block", "head"}
    cluster = cluster_file.build({"devices": [{"profile": "my_gpu.json", "memory_GB": 24}]}, ran[1])
    assert cluster.measured[0] is not None


def test_the_lines_of_python(ran, monkeypatch):
    code, = blocks("python")
    lines = code.splitlines()
    assert len(lines) == 5
    monkeypatch.chdir(ran[1])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    step_s, bottleneck = out.getvalue().splitlines()[0].split(" ", 1)
    plan = plan_file.read(ran[1] / "plan.json")
    assert float(step_s) == plan.step_s and bottleneck == plan.figures.bottleneck
    assert out.getvalue().split("\n", 1)[1].strip() == stdout_of(ran, "--to megatron").strip()
