"""Branch and bound over strategies, under the ends that the subset program left.

The stages are decided from the first on, depth first. The decided ones, at their exact costs, are put before every end
that can follow, and the branch is left where the longest path is no shorter than the best found; of the ways to go on,
that with the shortest one comes first. A strategy is worth its longest path, or its simulated step.
"""

import math
import time

import numpy as np
from numba import njit

from .. import cost, simulator, subset_program
from ..bound import ROUNDING, rising, simple_bound
from ..critical_path import label_parts, longest_path, value
from ..device_sets import place
from ..problem import Problem, Strategy
from ..subset_program import Ends, Program, end_key, find, transfers_behind

CHUNK = 200_000  # steps of `_descend` between two looks at the clock
STEPS_PER_S = 1e7  # of the program, at least


def minimise(problem: Problem, program: Program, upper_s: float | None, by_paths: bool, most_steps: float,
             deadline: float = math.inf) -> tuple[Strategy | None, float, bool]:
    """(the strategy that is worth least, None where none is worth less than upper_s; s that no feasible strategy is
    worth less than; whether the search is done) within about so many steps, and until a reading of time.perf_counter.

    upper_s: None: no feasible strategy is known, but there is one
    by_paths: a strategy is worth its longest path, else its step
    """
    lower_s = simple_bound(problem)
    for limit in rising(lower_s) if upper_s is None else [upper_s]:
        steps = min(most_steps, max(deadline - time.perf_counter(), 0.0) * STEPS_PER_S)
        ends, value = subset_program.solve(program, limit, steps)
        if value == subset_program.GIVEN_UP:
            return None, lower_s, False
        search = Branching(problem, program, ends, limit, by_paths)
        made = 0
        while not search.done and made < most_steps and time.perf_counter() < deadline:
            made += search.run()
        lower_s = max(lower_s, search.open_s * (1.0 - ROUNDING))
        if search.best is not None or not search.done:
            break
    return search.best, lower_s, search.done


class Branching:
    """The search for strategies of a problem that are worth less than `best_s`.

    best_s: s of the best strategy so far (at first, what is given); best: that strategy, None as long as none is better
    """

    def __init__(self, problem: Problem, program: Program, ends: Ends, best_s: float, by_paths: bool):
        """by_paths: a strategy is worth its longest path, else its step."""
        S, M, K, L = problem.stages, problem.micro_batches, problem.devices, problem.layers
        self.best_s, self.best, self.done = best_s, None, False
        self._given = program, cost.pack(problem), ends, simulator.op_table(problem.schedule, S, M), by_paths
        self._plan = np.zeros(S + 1, np.int64), np.zeros(K, np.int64), np.zeros(S + 1, np.int64)
        self._found = tuple(a.copy() for a in self._plan)
        self._scratch = (np.zeros((5, S)), np.zeros(K), np.zeros(K), simulator.workspace(S, M),
                         np.zeros(label_parts(program.blocking, program.one_f_one_b)))
        ways = len(program.sets.groups) * L
        self._levels = (np.zeros((S, ways, 2), np.int64), np.zeros((S, ways)), np.zeros((S, 2), np.int64),
                        np.zeros((S + 1, 2), np.int64))
        self._roots = [(float(b), int(x)) for x, b in enumerate(_roots(program, ends)) if b < best_s]
        self._roots.sort(reverse=True)
        self._depth = -1

    def run(self, steps: int = CHUNK) -> int:
        """Go on for about so many steps of some 0.2 us; `done` says whether nothing is left. Returns the steps made."""
        made = 0
        while made < steps and not self.done:
            if self._depth < 0:
                if not self._roots or self._roots[-1][0] >= self.best_s:
                    self.done = True
                    break
                self._levels[3][0] = self._roots.pop()[1], 0
                self._depth, self._levels[2][0, 0] = 0, -1
            self._depth, best_s, more = _descend(*self._given, self._plan, self._found, self._scratch, self._levels,
                                                 self._depth, self.best_s, steps - made)
            made += more
            if best_s < self.best_s:
                self.best_s, self.best = best_s, cost.decode(*self._found)
        return made

    @property
    def open_s(self) -> float:
        """No strategy that is worth less than best_s is worth less than this."""
        left = [bound for bound, _ in self._roots]
        _, bounds, counts, _ = self._levels
        for depth in range(self._depth + 1):
            count, done = counts[depth].tolist()
            if count < 0:  # not looked into yet: what the level above says of it
                left.append(bounds[depth - 1, counts[depth - 1, 1] - 1] if depth else 0.0)
            elif done < count:
                left.append(bounds[depth, done])
        return min([self.best_s, *left])


@njit(cache=True)
def _roots(q, ends):
    """[N] least value of a pipeline that uses exactly the devices of a set."""
    least = np.full(q.sets.size.shape[0], np.inf)
    for x in range(least.shape[0]):
        for b in range(q.sets.within_start[x], q.sets.within_start[x + 1]):
            slot = find(ends, end_key(q, q.stages, x, q.sets.within[b], -1, 0))
            for a in range(ends.count[slot] if slot >= 0 else 0):
                least[x] = min(least[x], value(ends.labels[slot, a], q.micro_batches, q.one_f_one_b))
    return least


@njit(cache=True)
def _descend(q, p, ends, ops, by_paths, plan, found, scratch, levels, depth, best, steps):
    """Go on at a depth until nothing is left of the root (depth -1) or the steps are made: (depth, best, steps)."""
    bounds, order, starts = plan
    stages, used, share, _, _ = scratch
    ways, way_bound, counts, sets_ = levels  # sets_: what is left and what is taken, before each stage
    S, made = starts.shape[0] - 1, 0
    while depth >= 0 and made < steps:
        if counts[depth, 0] < 0:
            best, more = _expand(q, p, ends, ops, by_paths, plan, found, scratch, levels, depth, best)
            made += more
        made += 1
        at = counts[depth, 1]
        if at == counts[depth, 0] or way_bound[depth, at] >= best:
            depth -= 1
            continue
        counts[depth, 1] += 1
        g, j = ways[depth, at, 0], ways[depth, at, 1]
        _decide(q, p, plan, scratch, depth, g, j, sets_[depth, 1])
        sets_[depth + 1, 0] = sets_[depth, 0] - q.sets.groups[g]
        sets_[depth + 1, 1] = sets_[depth, 1] + q.sets.groups[g]
        depth += 1
        counts[depth, 0] = -1
    return depth, best, made


@njit(cache=True)
def _decide(q, p, plan, scratch, s, g, j, taken):
    """Let stage s be group g with the layers up to j: exact costs. Returns the bytes over memory."""
    bounds, order, starts = plan
    stages, used, share, _, _ = scratch
    starts[s + 1] = place(q.sets, g, taken, order, starts[s])
    bounds[s + 1] = j
    over = cost.fill_stage(p, bounds, order, starts, s, stages, used, share)
    if s > 0:
        cost.fill_sends(p, bounds, order, starts, s - 1, stages, share)
    return over


@njit(cache=True)
def _expand(q, p, ends, ops, by_paths, plan, found, scratch, levels, s, best):
    """List the ways to decide stage s by rising longest path, or, for the last stage, value the strategy; returns the
    best and the steps made."""
    bounds, order, starts = plan
    stages, _, _, space, nothing = scratch
    ways, way_bound, counts, sets_ = levels
    sets, S, M, L = q.sets, q.stages, q.micro_batches, q.costs.output.shape[0] - 1
    n, i = S - s, bounds[s]
    x, taken = sets_[s, 0], sets_[s, 1]
    count = made = 0
    for b in range(sets.within_start[x], sets.within_start[x + 1]):
        g = sets.within[b]
        y = x - sets.groups[g]
        if sets.size[y] < n - 1 or (n == 1 and y > 0):
            continue
        for j in range(L if n == 1 else i + 1, L - n + 2):
            if q.costs.fits[g, i, j] < n or _decide(q, p, plan, scratch, s, g, j, taken) > 0.0:
                continue
            if n == 1:
                least = longest_path(stages, s, 0.0, 0.0, M, q.blocking, q.one_f_one_b, nothing)
                made += S
                if least < best:
                    if not by_paths:
                        least = simulator.run_step(ops, stages, q.blocking, space)
                        made += ops.shape[0] // 20
                    if least < best:
                        best = least
                        found[0][:], found[1][:], found[2][:] = bounds, order, starts
                continue
            least = np.inf
            first, last = sets.within_start[y], sets.within_start[y + 1]
            if q.link.shape[0] == 0:
                first, last = 0, 1
            for c in range(first, last):
                h = sets.within[c]
                slot = find(ends, end_key(q, n - 1, y, h, g, j))
                if slot < 0:
                    continue
                ahead, back = transfers_behind(q, g, y, h, j)
                for a in range(ends.count[slot]):
                    least = min(least, longest_path(stages, s, ahead, back, M, q.blocking, q.one_f_one_b,
                                                    ends.labels[slot, a]))
                    made += s + 1
            if least < best:
                at = count
                while at > 0 and way_bound[s, at - 1] > least:
                    way_bound[s, at] = way_bound[s, at - 1]
                    ways[s, at, 0], ways[s, at, 1] = ways[s, at - 1, 0], ways[s, at - 1, 1]
                    at -= 1
                way_bound[s, at], ways[s, at, 0], ways[s, at, 1] = least, g, j
                count += 1
    counts[s, 0], counts[s, 1] = count, 0
    return best, made
