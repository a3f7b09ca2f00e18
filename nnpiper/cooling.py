"""Annealing against the clock: how hot and how many moves, chunk after chunk, so that a search ends in time."""

import time
from collections.abc import Iterator

from .problem import Problem

FIRST = 100  # moves of the first chunk, which shows the pace
LEAST = 20  # moves that are worth another call
CARE = 0.9  # of the moves for which there is time: the next ones may be slower


LEAST_FALL = 20  # times, from the first to the last temperature, with a device a stage: there the first is low already


def temperatures(problem: Problem, hot: float, hottest: float, hot_alone: float, cold: float) -> tuple[float, float]:
    """The first and the last temperature of a search, relative to the step: from hot / K, as more devices need more
    moves, but at most hottest, to cold. With a device a stage, where every move changes little, from at most
    hot_alone / K^3, and lower than cold where the fall would be less than LEAST_FALL."""
    K = problem.devices
    first = min(hot / K, hottest)
    if problem.stages < K:
        return first, cold
    first = min(first, hot_alone / K**3)
    return first, min(cold, first / LEAST_FALL)


def chunks(hot: float, cold: float, end: float, most: int) -> Iterator[tuple[tuple[float, float], int]]:
    """((temperature at the start, at the end), moves) of chunks of at most `most` moves, until time.perf_counter() is
    about `end`; the temperature falls geometrically from hot to cold (0 and 0: descent)."""
    begin = last = time.perf_counter()
    count, pace = min(FIRST, most) if begin < end else 0, 0.0

    def temperature(now):
        return hot * (cold / hot) ** min((now - begin) / max(end - begin, 1e-9), 1.0) if hot > 0.0 else 0.0

    while count >= min(LEAST, most):
        yield (temperature(last), temperature(last + count * pace)), count
        now = time.perf_counter()
        pace, last = max((now - last) / count, 1e-9), now
        count = min(int(CARE * (end - now) / pace), most)
