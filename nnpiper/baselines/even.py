"""Even split: equal layer counts, devices in the given order (the default of Megatron-LM, Narayanan et al. 2021).

It looks at no cost. Where S does not divide L or K, the first stages get one layer or one device more.
"""

from ..problem import Problem, Strategy


def solve(problem: Problem) -> Strategy:
    """Stages of equal layer counts on runs of equally many devices; all devices are used."""
    starts = even_starts(problem.devices, problem.stages)
    groups = tuple(tuple(range(first, last)) for first, last in zip(starts, starts[1:]))
    return Strategy(tuple(even_starts(problem.layers, problem.stages)[1:-1]), groups)


def even_starts(count: int, parts: int) -> list[int]:
    """[parts + 1] where each of `parts` runs of `count` things starts; the longer runs come first."""
    small, rest = divmod(count, parts)
    return [i * small + min(i, rest) for i in range(parts + 1)]
