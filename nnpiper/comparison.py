"""Comparison: every planner on one problem, and none can hold up the others.

The baselines run one after the other in a process of their own, which is stopped, and started anew for the rest, where
a planner takes longer than its limit. Each kernel is compiled on a small problem first and not counted.
"""

import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from . import cost, simulator
from .problem import SHAPES, InputError, Problem, Strategy

NNPIPER_BUDGET_S = 0.1
START_S = 300.0  # to import and compile, beside the limit
LONGEST_S = 86_400.0


@dataclass(frozen=True)
class Row:
    """One planner on the problem. Without a strategy, `note` says why, and all else is None.

    gap: step over that of the best plan that fits, minus 1; None where this one does not fit
    """

    planner: str
    strategy: Strategy | None = None
    solve_s: float | None = None
    step_s: float | None = None
    overflow_bytes: float | None = None
    gap: float | None = None
    note: str = ""

    @property
    def feasible(self) -> bool:
        return self.overflow_bytes == 0.0


def compare(problem: Problem, limit_s: float = 20.0, piper=None, seed: int = 0) -> list[Row]:
    """A row a planner: those that fit by their step, then those over memory, then those without a plan.

    limit_s: seconds that each planner may take; piper: solver.NNPiper, None loads the shipped one. Raises InputError.
    """
    if not 0.0 < limit_s <= LONGEST_S:
        raise InputError(f"limit_s: {limit_s}; allowed: over 0, at most {LONGEST_S:g} seconds")
    from .baselines import PLANNERS

    answers = [_nnpiper(problem, min(limit_s, NNPIPER_BUDGET_S), piper, seed)]
    answers += baseline_answers(problem, list(PLANNERS), limit_s, seed)
    rows = [_judged(problem, answer) for answer in answers]
    best = min((row.step_s for row in rows if row.feasible), default=None)
    rows = [Row(**vars(row) | {"gap": row.step_s / best - 1 if best else 0.0}) if row.feasible else row
            for row in rows]
    return sorted(rows, key=lambda row: (row.strategy is None, row.overflow_bytes or 0.0, row.step_s or 0.0))


def baseline_answers(problem: Problem, names: list[str], limit_s: float, seed: int = 0) -> list[dict]:
    """A dict a planner: planner, and strategy and solve_s, or a note why there is none."""
    answers = []
    while len(answers) < len(names):
        answers += _run(problem, names[len(answers):], limit_s, seed)
    return answers


def small(problem: Problem) -> Problem:
    """The first few layers, devices and micro-batches of a problem; all devices used where the whole uses all."""
    S = min(problem.stages, 3)
    sizes = {"L": min(problem.layers, 6), "K": S if problem.stages == problem.devices else min(problem.devices, 4)}
    arrays = {name: getattr(problem, name)[tuple(slice(sizes[letter]) for letter in letters)]
              for name, letters in SHAPES.items()}
    return problem.replace(**arrays, stages=S, micro_batches=min(problem.micro_batches, 4))


def _nnpiper(problem, budget_s, piper, seed):
    if piper is None:
        from .solver import NNPiper
        piper = NNPiper.from_pretrained()
    piper.solve(problem, seed=seed, moves=1)  # the same problem, as some kernels serve only those that memory binds
    begin = time.perf_counter()
    strategy = piper.solve(problem, budget_s=budget_s, seed=seed)
    return {"planner": "nnpiper", "strategy": strategy, "solve_s": time.perf_counter() - begin}


def _judged(problem, answer):
    if "strategy" not in answer:
        return Row(**answer)
    strategy = answer["strategy"]
    return Row(**answer, step_s=simulator.step_time(problem, strategy),
               overflow_bytes=cost.overflow_bytes(problem, strategy))


def _run(problem, names, limit_s, seed):
    """Answers of the first of these planners, up to the first that had to be stopped."""
    worker = subprocess.Popen([sys.executable, "-c", "from nnpiper.comparison import work; work()"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    lines = queue.SimpleQueue()
    threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True).start()
    answers = []
    try:
        pickle.dump((problem, names, seed), worker.stdin)
        worker.stdin.flush()
        for name in names:
            try:
                ready = lines.get(timeout=START_S)
                answer = ready and lines.get(timeout=limit_s)
            except queue.Empty:
                answers.append({"planner": name, "note": f"stopped after {limit_s:g} s"})
                break
            if answer is None:
                answers.append({"planner": name, "note": "ended without an answer, perhaps for lack of memory"})
                break
            if "cuts" in answer:
                strategy = Strategy(tuple(answer.pop("cuts")), tuple(map(tuple, answer.pop("groups"))))
                answer["strategy"] = strategy
            answers.append(answer)
    finally:
        worker.kill()
        worker.wait()
        worker.stdin.close()
    return answers


def _read(stream, lines):
    """Lines of JSON into the queue, None at their end."""
    with stream:
        for line in stream:
            lines.put(json.loads(line))
    lines.put(None)


def work() -> None:
    """The process of the baselines: reads (problem, planners, seed) and prints two lines of JSON a planner, the first
    once its kernels are compiled, the second with its answer."""
    from .baselines import PLANNERS, PlannerLimit

    problem, names, seed = pickle.load(sys.stdin.buffer)
    problem = problem.replace()  # read-only arrays again, which are a type of their own to compiled code
    for name in names:
        options = {"seed": seed} if name == "anneal" else {}
        PLANNERS[name](small(problem), **options)
        print(json.dumps({"planner": name}), flush=True)
        begin = time.perf_counter()
        try:
            strategy = PLANNERS[name](problem, **options)
            answer = {"cuts": strategy.cuts, "groups": strategy.groups, "solve_s": time.perf_counter() - begin}
        except PlannerLimit as error:
            answer = {"note": f"not applicable: {str(error).removeprefix(f'{name}: ')}"}
        print(json.dumps({"planner": name} | answer), flush=True)
