"""Simulator: stage arrays + schedule -> the exact step time, or the whole timeline.

A step is M micro-batches through all S stages, forward and backward, and the all-reduce of replicated stages. The
simulator runs the operations of a schedule's program one by one: an operation starts when its stage is free and its
input has arrived. It knows no devices. About 1.5-2 ns an operation; under GPipe the compiled loops use the same step's
closed form.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import get_num_threads, njit, prange, set_num_threads

from . import cost, schedule
from .cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD, StageArrays
from .problem import SCHEDULES, TRANSFERS, Problem, Strategy, check_choice
from .schedule import F


@dataclass(frozen=True)
class Timeline:
    """When everything happens, seconds from the start of the step. Kind 0 is F, 1 is B.

    start_s, end_s: [2, S, M] of the operation
    arrive_s: [2, S, M] when its output has arrived at the next stage (the stage before, for B); its transfer takes the
        last send_s[kind, stage] before that
    send_s: [2, S]
    all_reduce_s: [S]
    step_s: the whole
    """

    start_s: np.ndarray
    end_s: np.ndarray
    arrive_s: np.ndarray
    send_s: np.ndarray
    all_reduce_s: np.ndarray
    step_s: float

    @property
    def idle_share(self) -> np.ndarray:
        """[S] share of the step in which the stage computes nothing (bubbles, waits and transfers)."""
        busy = (self.end_s - self.start_s).sum(axis=(0, 2))
        return 1.0 - busy / self.step_s if self.step_s > 0 else np.zeros(len(busy))


def simulate(stages: StageArrays, schedule_name: str, micro_batches: int, transfers: str) -> float:
    """Step time in s of stage arrays under a schedule ("1f1b", "gpipe") and transfers ("blocking", "overlapped").
    Raises InputError for other names."""
    check_choice("schedule", schedule_name, SCHEDULES)
    check_choice("transfers", transfers, TRANSFERS)
    S = len(stages.forward_s)
    ops = op_table(schedule_name, S, micro_batches)
    return run_step(ops, stages.matrix(), transfers == "blocking", workspace(S, micro_batches))


def timeline(problem: Problem, strategy: Strategy) -> Timeline:
    """The step of a strategy with the times of all operations. Raises InputError where the strategy is not valid."""
    S, M = problem.stages, problem.micro_batches
    stages = cost.stage_arrays(problem, strategy).matrix()
    ops = op_table(problem.schedule, S, M)
    times = np.zeros((len(ops), 3))
    step_s = _run(ops, stages, problem.transfers == "blocking", workspace(S, M), times)
    start, end, arrive = np.zeros((3, 2, S, M))
    s, kind, m = schedule.program(problem.schedule, S, M).T
    start[kind, s, m], end[kind, s, m], arrive[kind, s, m] = times.T
    send = np.stack([stages[SEND_FORWARD], np.roll(stages[SEND_BACKWARD], 1)])
    return Timeline(start, end, arrive, send, stages[ALL_REDUCE], step_s)


def step_time(problem: Problem, strategy: Strategy) -> float:
    """Exact step time in s of one strategy. Raises InputError where the strategy is not valid."""
    stages = cost.stage_arrays(problem, strategy)
    return simulate(stages, problem.schedule, problem.micro_batches, problem.transfers)


def step_times(problem: Problem, bounds, order, starts, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """[N] step times in s and [N] bytes over memory of N strategies as `cost.encode` writes them (valid by
    construction). Keeps to one thread unless asked for more."""
    S, M = problem.stages, problem.micro_batches
    ops = op_table(problem.schedule, S, M)
    rules = problem.transfers == "blocking", problem.schedule == "1f1b", M
    arguments = cost.pack(problem), ops, *rules, bounds, order, starts
    if threads == 1:
        return evaluate_all(*arguments)
    before = get_num_threads()
    set_num_threads(threads)
    try:
        return _batch_parallel(*arguments)
    finally:
        set_num_threads(before)


def lower_bound(problem: Problem, strategy: Strategy) -> float:
    """A time in s that no schedule run of this strategy falls under (design: head + work of a stage, and under 1F1B
    head + round trips)."""
    stages = cost.stage_arrays(problem, strategy).matrix()
    return step_bound(stages, problem.micro_batches, problem.transfers == "blocking", problem.schedule == "1f1b")


def closed_form(stages: StageArrays, micro_batches: int) -> float:
    """sum (F + B) + 2 sum c + (M - 1) max (F + B), the step of Alpa, AMP and Metis (c: both directions summed)."""
    work = stages.forward_s + stages.backward_s
    transfers = stages.send_forward_s.sum() + stages.send_backward_s.sum()
    return float(work.sum() + transfers + (micro_batches - 1) * work.max())


@lru_cache(maxsize=256)
def op_table(schedule_name: str, S: int, M: int) -> np.ndarray:
    """[2 S M, 4] a schedule's program as the compiled loop reads it: stage, row of the durations (kind S + stage),
    cell of the input's arrival time, cell of the output's. A cell stands for (kind, stage that waits, micro-batch);
    the stages are shifted by one, as both ends of the pipeline send to nobody. Unsigned: signed indices cost a test."""
    s, kind, m = schedule.program(schedule_name, S, M).T
    cell = (kind * (S + 2) + s + 1) * M + m
    table = np.stack([s, kind * S + s, cell, np.where(kind == F, cell + M, cell - M)], axis=1).astype(np.uint32)
    table.flags.writeable = False
    return table


@njit(cache=True)
def workspace(S, M):
    """Scratch of simulations of one S and M: arrival times [2 (S + 2) M] (the cells that nobody writes stay 0), when
    each stage [S] and channel [2 S] is free, durations and sends [2 S], and the timeline that is not kept."""
    return np.zeros(2 * (S + 2) * M), np.zeros(S), np.zeros(2 * S), np.zeros(2 * S), np.zeros(2 * S), np.zeros((0, 3))


@njit(cache=True)
def run_step(ops, stages, blocking, space):
    """Step time of stage arrays [5, S]; no timeline."""
    return _run(ops, stages, blocking, space, space[5])


@njit(cache=True)
def _run(ops, stages, blocking, space, times):
    """times [len(ops), 3] (start, end, arrival) is filled unless it is empty."""
    arrival, free, channel, duration, send, _ = space
    S = stages.shape[1]
    for s in range(S):
        duration[s], duration[S + s] = stages[FORWARD, s], stages[BACKWARD, s]
        send[s] = stages[SEND_FORWARD, s]
        send[S + s] = stages[SEND_BACKWARD, s - 1] if s > 0 else 0.0
    free[:] = 0.0
    channel[:] = 0.0
    record = times.shape[0] > 0
    for i in range(ops.shape[0]):
        s, row, source, target = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 3]
        start = max(free[s], arrival[source])
        end = start + duration[row]
        sent = max(end, channel[row]) + send[row]
        channel[row] = sent
        arrival[target] = sent
        free[s] = sent if blocking else end
        if record:
            times[i, 0], times[i, 1], times[i, 2] = start, end, sent
    step = 0.0
    for s in range(S):
        step = max(step, free[s] + stages[ALL_REDUCE, s])
    return step


@njit(cache=True, error_model="numpy")
def gpipe_step(stages, M, blocking):
    """The GPipe step of stage arrays [5, S], in O(S), equal to `run_step`'s but for rounding.

    Each phase is a permutation flow shop of M equal jobs, in which job M leaves a machine after sum + (M - 1) x max of
    the machines up to it. A stage is a machine, with its send where transfers block, else the channel is the next one.
    The last stage begins its B's when its F's are done; by then all others have done theirs, and sent them.
    """
    S = stages.shape[1]
    way, widest = 0.0, 0.0
    for s in range(S):
        forward, send = stages[FORWARD, s], stages[SEND_FORWARD, s]
        way += forward + send
        widest = max(widest, forward + send) if blocking else max(widest, forward, send)
    turn = way + (M - 1) * widest
    way, widest, step = 0.0, 0.0, 0.0
    for s in range(S - 1, -1, -1):
        backward, send = stages[BACKWARD, s], stages[SEND_BACKWARD, s - 1] if s > 0 else 0.0
        busy = backward + send if blocking else backward
        widest = max(widest, busy)
        step = max(step, turn + way + busy + (M - 1) * widest + stages[ALL_REDUCE, s])
        way += backward + send
        if not blocking:
            widest = max(widest, send)
    return step


@njit(cache=True)
def step_bound(stages, M, blocking, one_f_one_b):
    """Lower bound of the step of stage arrays [5, S], in O(S); under GPipe the step itself. Under 1F1B, for
    every stage: the first micro-batch's way in, the stage's own work (with blocking transfers also its sends, but for
    the last, which is on the way out), the last one's way out, beside which the stage's all-reduce runs; and
    ceil(M / (S - s)) round trips to the last stage, as S - s micro-batches are in flight.
    """
    if not one_f_one_b:
        return gpipe_step(stages, M, blocking)
    S = stages.shape[1]
    total = 0.0  # compute and transfers of one micro-batch through all stages and back
    for s in range(S):
        total += stages[FORWARD, s] + stages[BACKWARD, s] + stages[SEND_FORWARD, s] + stages[SEND_BACKWARD, s]
    bound = head = way_in = 0.0
    for s in range(S):
        work = stages[FORWARD, s] + stages[BACKWARD, s]
        own = M * work
        if blocking:
            own += M * stages[SEND_FORWARD, s]
            if s > 0:
                own += (M - 1) * stages[SEND_BACKWARD, s - 1]
        bound = max(bound, head + own, way_in + own + stages[ALL_REDUCE, s])
        bound = max(bound, head + math.ceil(M / (S - s)) * (total - head))
        head += work + stages[SEND_FORWARD, s] + stages[SEND_BACKWARD, s]
        way_in += stages[FORWARD, s] + stages[SEND_FORWARD, s]
    return bound


@njit(cache=True)
def evaluate_all(p, ops, blocking, one_f_one_b, M, bounds, order, starts):
    """`step_times` of packed costs."""
    N, S = bounds.shape[0], bounds.shape[1] - 1
    step, overflow = np.zeros(N), np.zeros(N)
    stages, used, share, space = np.zeros((5, S)), np.zeros(order.shape[1]), np.zeros(order.shape[1]), workspace(S, M)
    for n in range(N):
        overflow[n] = cost.fill_stage_arrays(p, bounds[n], order[n], starts[n], stages, used, share)
        step[n] = run_step(ops, stages, blocking, space) if one_f_one_b else gpipe_step(stages, M, blocking)
    return step, overflow


@njit(cache=True, parallel=True)
def _batch_parallel(p, ops, blocking, one_f_one_b, M, bounds, order, starts):
    N = bounds.shape[0]
    step, overflow = np.zeros(N), np.zeros(N)
    for n in prange(N):
        one = slice(n, n + 1)
        step[one], overflow[one] = evaluate_all(p, ops, blocking, one_f_one_b, M, bounds[one], order[one],
                                                starts[one])
    return step, overflow
