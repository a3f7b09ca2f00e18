"""The emulated cluster as seen from outside: starts it, sends it jobs, checks what it answers.

Symbols: S stages, M micro-batches, F(s), B(s) the stage's times of one micro-batch, c(s) a transfer.
"""

import json
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from .. import schedule as schedules
from ..cost import StageArrays
from ..problem import InputError
from . import links
from .stage import WEIGHTS

PROBE_BYTES_PER_S = 250e6  # the fastest link in use
PAUSE_S = 0.01  # about a mean operation


class EmulatorError(RuntimeError):
    """The emulated cluster did not start, a stage of it died, or it did not compute what it should."""


@dataclass(frozen=True)
class Job:
    """One strategy as the engine runs it. Seconds, bytes, bytes per second; lists by stage, or by boundary.

    output_bytes [S - 1]: what crosses a boundary, per micro-batch; its gradient is as large
    ahead_bytes_per_s, back_bytes_per_s [S - 1]: payload bandwidth of the boundary's directed pairs, activation and
        gradient
    """

    schedule: str
    micro_batches: int
    forward_s: list[float]
    backward_s: list[float]
    all_reduce_s: list[float]
    output_bytes: list[int]
    ahead_bytes_per_s: list[float]
    back_bytes_per_s: list[float]

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    def stage_arrays(self, latency_s: float = 0.0, overhead_s: float = 0.0) -> StageArrays:
        """The simulator's input: each transfer latency + bytes / bandwidth, each operation `overhead_s` longer."""
        size = np.array(self.output_bytes, float)
        return StageArrays(np.array(self.forward_s) + overhead_s, np.array(self.backward_s) + overhead_s,
                           latency_s + size / np.array(self.ahead_bytes_per_s, float),
                           latency_s + size / np.array(self.back_bytes_per_s, float), np.array(self.all_reduce_s))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Run:
    """What the engine did with a job: steps_s [steps], and of the last step operations_s {(kind "F" or "B", stage,
    micro-batch): (begin, end)}, seconds from its start, and sent_bytes [S] over the network, headers included."""

    steps_s: list[float]
    operations_s: dict[tuple[str, int, int], tuple[float, float]]
    sent_bytes: list[int]


class Emulator:
    """A running emulated cluster of up to `ranks` stages, 1 to 8; to be used in a `with`. Raises EmulatorError, and
    InputError where tools or rights are missing."""

    def __init__(self, ranks: int):
        if not 1 <= ranks <= len(WEIGHTS):
            raise InputError(f"ranks: {ranks}; allowed: 1 to {len(WEIGHTS)}")
        access = links.access()
        if access.lacking:
            raise InputError(f"emulated cluster: {access.lacking}")
        environment = {**links.environment(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.ranks = ranks
        self.access = access
        self.process = subprocess.Popen(links.enter_command(links.hub_command(ranks), access), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)
        try:
            self._answer()
            self.torch_version = self._ask("join")[0]["torch"]
        except BaseException:  # also an interrupt: nobody else would close it
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """End all its processes; the kernel then removes its links."""
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):  # a line that the process never read
            self.process.stdin.close()
        self.process.stdout.close()

    def run(self, job: Job, steps: int, receives_first: bool = True) -> Run:
        """A warm-up without compute, then `steps` steps. Raises EmulatorError where the order of a stage's operations
        is not our schedule's, or a gradient is wrong."""
        if job.stages > self.ranks:
            raise InputError(f"stages: {job.stages}; allowed: at most {self.ranks}")
        rates = [{} for _ in range(self.ranks)]
        for s, (ahead, back) in enumerate(zip(job.ahead_bytes_per_s, job.back_bytes_per_s)):
            rates[s][s + 1], rates[s + 1][s] = ahead, back
        fields = asdict(job)
        del fields["ahead_bytes_per_s"], fields["back_bytes_per_s"]
        answers = self._ask("run", **fields, stages=job.stages, rates=rates, steps=steps, receives_first=receives_first)
        return read_answers(job, answers[:job.stages])

    def latency_s(self) -> float:
        """One small message between two stages: the median of half a round trip, after a pause as long as an operation,
        since a process that slept starts slowly. Needs two ranks."""
        if self.ranks < 2:
            raise InputError(f"ranks: {self.ranks}; allowed: at least 2 to measure a latency")
        rates = [{1: PROBE_BYTES_PER_S}, {0: PROBE_BYTES_PER_S}]
        return float(np.median(self._ask("probe", rates=rates, bytes=4, repeats=60, pause_s=PAUSE_S)[0]))

    def overhead_s(self) -> float:
        """What an operation takes beyond its sleep (autograd, the schedule's bookkeeping, waking up): a pipeline of one
        stage, which sends nothing."""
        job = Job("1f1b", 16, [PAUSE_S], [PAUSE_S], [0.0], [], [], [])
        return float(np.median(self.run(job, 5).steps_s)) / (2 * job.micro_batches) - PAUSE_S

    def _ask(self, do, **fields):
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says so
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise EmulatorError(f"emulated cluster: ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise EmulatorError(f"emulated cluster: {answer['failed']}")
        return answer


def read_answers(job: Job, answers: list[dict]) -> Run:
    """The run that the stages' answers (see `stage.run`) tell of; a step lasts from the first stage's start to the last
    one's end. Raises EmulatorError where the operations or the gradients are not what the job asked for."""
    order = schedules.stage_order(job.schedule, job.stages, job.micro_batches)
    # the loss is the product of all weights and the input 1 + m, summed over the micro-batches
    product = np.prod(WEIGHTS[:job.stages]) * job.micro_batches * (job.micro_batches + 1) / 2
    spans = np.array([answer["spans"] for answer in answers])  # [S, steps, 2]
    begin = spans[:, :, 0].min(axis=0)
    operations = {}
    for s, answer in enumerate(answers):
        if [(kind, m) for kind, m, *_ in answer["operations"]] != [("FB"[kind], m) for kind, m in order[s].tolist()]:
            raise EmulatorError(f"stage {s}: operations in another order than {job.schedule}'s")
        if not np.isclose(answer["gradient"], product / WEIGHTS[s], rtol=1e-5):
            raise EmulatorError(f"stage {s}: gradient {answer['gradient']}; expected {product / WEIGHTS[s]}")
        for kind, m, *span in answer["operations"]:
            operations[kind, s, m] = tuple(float(t - begin[-1]) for t in span)
    steps_s = (spans[:, :, 1].max(axis=0) - begin).tolist()
    return Run(steps_s, operations, [answer["sent"] for answer in answers])
