"""torch.distributed.pipelining runs exported plans: same loss, same gradients, same order of operations.

The exported text is used as it is: its torchrun lines start the ranks, one launcher for each, and its Python splits the
model and builds the schedule. Symbols: S stages, M micro-batches.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import export_parsers
import pytest
import torch
from engine_worker import BLOCKS, MICRO_BATCHES, SEQUENCES, TOKENS, loss, model_and_data

from nnpiper import export, schedule
from nnpiper.plan_file import PlanFile

WORKER = Path(__file__).with_name("engine_worker.py")
KINDS = ("1f1b", "gpipe")
COUNTS = [3, 5, 2]  # embedding and two blocks; five blocks; a block and the head


def make(kind):
    """A plan with a schedule of KINDS, the second with recomputation: unequal stages, back and forth between two names
    of this machine, devices in another order than the stages'."""
    devices = [("127.0.0.1", 0), ("localhost", 1), ("localhost", 4)]
    return PlanFile(
        model="gpt2", layer_kinds=["embedding", *["block"] * BLOCKS, "head"], micro_batches=MICRO_BATCHES,
        micro_batch_size=SEQUENCES // MICRO_BATCHES, sequence_length=TOKENS, schedule=kind, transfers="blocking",
        recompute=kind == "gpipe", devices=[dict(name=f"cpu{k}", title="CPU", node=node, index=index)
                                  for k, (node, index) in enumerate(devices)],
        cuts=[COUNTS[0], COUNTS[0] + COUNTS[1]], groups=[[2], [0], [1]], step_s=1.0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """[S] what each rank saw of one step of the 1F1B plan and of the GPipe plan."""
    folder = tmp_path_factory.mktemp("engine")
    for kind in KINDS:
        (folder / f"{kind}.py").write_text(export.export(make(kind), "torch"))
    lines = re.findall(r"^# (CUDA_.* torchrun .*) train\.py$", (folder / "1f1b.py").read_text(), re.MULTILINE)
    assert len(lines) == 3  # one for each run of ranks on one node
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    arguments = [str(WORKER), str(folder), *(str(folder / f"{kind}.py") for kind in KINDS)]
    launchers = [subprocess.Popen(["bash", "-c", f'{line} "$@"', "bash", *arguments], env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
                 for line in lines]
    try:
        for launcher in launchers:
            output, _ = launcher.communicate(timeout=180)
            assert launcher.returncode == 0, output
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.communicate()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)]


def test_ranks_are_the_devices_in_stage_order(ranks):
    parsed = export_parsers.torch(export.export(make("1f1b"), "torch"), "gpt", BLOCKS)
    assert parsed.layers == COUNTS
    assert parsed.devices == [[("localhost", 4)], [("127.0.0.1", 0)], [("localhost", 1)]]
    assert [rank["device"] for rank in ranks] == ["4", "0", "1"]
    assert [plan["stage"] for rank in ranks for plan in rank["plans"]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("i, kind", list(enumerate(KINDS)))
def test_loss_and_gradients_are_those_of_the_unsplit_model(ranks, i, kind):
    model, tokens, target = model_and_data()
    whole = loss(model(tokens), target)
    whole.backward()
    losses = ranks[-1]["plans"][i]["losses"]
    assert len(losses) == MICRO_BATCHES
    torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64).mean(), whole.detach(), rtol=1e-12, atol=0)

    gradients = {}
    for stage, rank in enumerate(ranks):
        held = rank["plans"][i]["gradients"]
        blocks = {name.split(".")[2] for name in held if ".h." in name}
        assert len(blocks) == COUNTS[stage] - (stage == 0) - (stage == 2)
        assert ("transformer.wte.weight" in held) == (stage == 0) and ("lm_head.weight" in held) == (stage == 2)
        assert not gradients.keys() & held.keys()
        gradients |= held
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name  # else the comparison says nothing
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("i, kind", list(enumerate(KINDS)))
def test_every_rank_runs_the_operations_of_our_schedule(ranks, i, kind):
    order = schedule.stage_order(kind, len(COUNTS), MICRO_BATCHES)
    for stage, rank in enumerate(ranks):
        assert rank["plans"][i]["operations"] == [("FB"[kind], m) for kind, m in order[stage].tolist()]


def test_blocks_are_recomputed_where_the_plan_says_so(ranks):
    """Numbers that autograd keeps from the middle stage's forward passes, which are all blocks."""
    without, recomputed = (plan["kept"] for plan in ranks[1]["plans"])
    assert recomputed < 0.05 * without
