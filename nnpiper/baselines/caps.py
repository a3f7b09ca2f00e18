"""The cap on max C: how the planners with the step (M - 1) max C + sum treat the maximum (Alpa, section 5.2).

Under a fixed cap on max C the sum alone is left to a dynamic program. The papers run the program once for every
value that max C can take. Here the caps that cannot win are skipped: the least sum never grows with the cap, so if
the sum under a cap and a lower cap's own value together are no better than the best plan so far, no cap between wins.
The result is that of the full enumeration.
"""

import heapq
import math

import numpy as np

TOLERANCE = 1e-12  # relative; running sums make equal stages differ by rounding


def minimise(values: np.ndarray, micro_batches: int, solve):
    """(value in s, plan) of the least sum + (M - 1) max; (inf, None) where no plan is allowed.

    values: [N] ascending, all that max C can be
    solve(cap, limit) -> (sum in s, max C in s, plan) with the least sum among plans with max C <= cap; the sum is
        inf where there is none below `limit`
    """
    best, best_plan = math.inf, None
    heap = [(0.0, -1, len(values), 0.0)]  # bound, caps (low, high) not yet settled, least sum under them

    def push(low, high, least):
        if high - low > 1 and least < math.inf:
            heapq.heappush(heap, (least + (micro_batches - 1) * values[low + 1], low, high, least))

    while heap:
        bound, low, high, least = heapq.heappop(heap)
        if bound >= best * (1.0 - TOLERANCE):
            break
        cap = high - 1 if high == len(values) else (low + high) // 2
        total, largest, plan = solve(values[cap], best - (micro_batches - 1) * values[low + 1])
        if total + (micro_batches - 1) * largest < best:
            best, best_plan = total + (micro_batches - 1) * largest, plan
        # down to the plan's own maximum the plan stays the best one
        push(low, min(cap, int(np.searchsorted(values, largest))), total)
        push(cap, high, least)
    return best, best_plan
