"""Advice on a plan, in lines for people: what is better or as good with less, or what would make a model fit.

Nothing is advised that was not tried. Times are those of the request's objective.
"""

import re
from dataclasses import replace

import numpy as np

from .plan_search import Found, Task
from .problem import MAX_MICRO_BATCHES, InputError
from .workload import Workload

AS_FAST = 0.01  # plans whose times differ by less are just as fast
NAMED = 4  # devices or ranges of layers that a line names, before it counts the rest


def with_fewer_devices(task: Task, best: Found) -> tuple[Found, list[str]]:
    """The best plan, or a better one that uses fewer devices, and a line where a number of devices less is as fast."""
    S, schedule = best.problem.stages, best.problem.schedule
    fewer, less = None, 1
    while (most := (fewer or best).used - less) >= S:
        found = task.solve(S, schedule, most=most)
        if found.key < best.key:
            best, fewer, less = found, None, 1
        elif found.overflow_bytes == 0 and found.value_s <= (1 + AS_FAST) * best.value_s:
            fewer, less = found, 2 * less
        else:
            break
    if fewer is None:
        return best, []
    return best, [f"{count(fewer.used, 'device')} would be just as fast, {_time(task, fewer)}, without "
                  f"{_dropped(task, best, fewer)}"]


def other_sizes(task: Task, best: Found, scanned: list[Found]) -> list[str]:
    """A line where another number of stages is faster, or a smaller one just as fast."""
    S, value_s = best.problem.stages, best.value_s
    if task.request.stages is not None:
        others = [size for size in task.all_sizes() if size != S]
        scanned = task.search(others, final=False)[1] if others else []
    others = [found for found in scanned if found.problem.stages != S and found.overflow_bytes == 0]
    fastest = min(others, key=lambda found: found.key, default=None)
    if fastest is not None and fastest.value_s < (1 - AS_FAST) * value_s:
        return [f"{_stages(fastest)} on {count(fastest.used, 'device')} would be faster, {_time(task, fastest)} "
                f"({1 - fastest.value_s / value_s:.0%} less)"]
    fewer = [found for found in others if found.problem.stages < S and found.value_s <= (1 + AS_FAST) * value_s]
    found = min(fewer, key=lambda found: found.problem.stages, default=None)
    return [] if found is None else [f"{_stages(found)} on {count(found.used, 'device')} would be just as "
                                     f"fast, {_time(task, found)}"]


def remedies(task: Task) -> list[str]:
    """Lines where no plan fits: what would make the model fit, each tried; all of it together where nothing does alone;
    or else what was tried, and what the memories lack in sum."""
    request, b, K = task.request, task.request.micro_batch_size, task.cluster.devices
    changes, lines, smaller = {}, [], None

    def try_out(name, change):
        changes[name] = change
        found = _tried(task, change)
        lines.extend([] if found is None else [f"{name} would make it fit: {_stages(found)}, {_time(task, found)}"])
        return found

    if request.schedule == "gpipe":
        try_out("the 1f1b schedule", {"schedule": "1f1b"})
    if task.most < K:
        try_out(f"all {K} devices", {"max_devices": None})
    if request.pins:
        try_out("no pins", {"pins": {}})
    if request.stages is not None and request.stages < max(task.all_sizes()):
        try_out("another number of stages", {"stages": None})
    if not isinstance(request.model, Workload):
        if not request.recompute:
            try_out("recomputation", {"recompute": True})
        for d in _smaller(request):
            M = request.micro_batches * b // d
            changes.pop(smaller, None)
            smaller = f"micro-batches of {d} ({M} of them)"
            if try_out(smaller, {"micro_batch_size": d, "micro_batches": M}) is not None:
                break
    if lines:
        return lines
    found = _tried(task, _joined(changes)) if len(changes) > 1 else None
    if found is None:
        tried = f"tried in vain: {', '.join(changes)}{' and all together' if len(changes) > 1 else ''}"
        return [tried if changes else "there is nothing left to try", *_short_in_sum(task, _joined(changes))]
    for name in list(changes):  # what the others can do without
        others = {other: change for other, change in changes.items() if other != name}
        if (simpler := _tried(task, _joined(others))) is not None:
            changes, found = others, simpler
    return [f"{', '.join(changes)} together would make it fit: {_stages(found)}, {_time(task, found)}"]


def _joined(changes):
    return {name: value for change in changes.values() for name, value in change.items()}


def _smaller(request):
    """Micro-batch sizes with which the same batch can be cut up, largest first."""
    b = request.micro_batch_size
    return [d for d in range(b - 1, 0, -1) if b % d == 0 and request.micro_batches * b // d <= MAX_MICRO_BATCHES]


def _tried(task, change):
    """The plan for a changed request, None where none was found that fits."""
    try:
        changed = Task.of(task.cluster, replace(task.request, **change), task.piper, task.seed)
    except InputError:  # such as too many operations in a step
        return None
    need, there = _in_sum(changed)
    if need > there:
        return None
    found, _ = changed.search(changed.sizes(), final=False)
    return found if found.overflow_bytes == 0 else None


def _short_in_sum(task, change):
    """A line where every layer once, with the activations of one micro-batch, is more than all memories together."""
    changed = Task.of(task.cluster, replace(task.request, **change), task.piper, task.seed)
    need, there = _in_sum(changed)
    if need <= there:
        return []
    return [f"the model needs at least {size(need)}, {count(changed.most, 'device')} together have "
            f"{size(there)}: {size(need - there)} short"]


def _in_sum(task):
    """Bytes that any plan needs at least on all devices together, and the bytes that there are."""
    kept = task.request.micro_batches if task.schedules == ("gpipe",) else 1
    need = task.workload.static_bytes.sum() + kept * task.workload.stash_bytes.sum()
    return need, np.sort(task.cluster.memory_bytes)[::-1][:task.most].sum()


def size(n: float) -> str:
    """Bytes for people, GB = 10^9.

    >>> size(4.1e9), size(2.5e4)
    ('4.1 GB', '25 kB')
    """
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= scale:
            return f"{n / scale:.3g} {unit}" if n < 1e3 * scale else f"{n / scale:.0f} {unit}"
    return f"{n:.3g} bytes"


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "device"), count(2, "micro-batch")
    ('1 device', '2 micro-batches')
    """
    return f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('ch') else 's'}"


def layer_range(names: tuple[str, ...]) -> str:
    """Names with consecutive numbers as ranges.

    >>> layer_range(("embedding", "block 0", "block 1", "block 2", "head"))
    'embedding, block 0-2, head'
    """
    parts = []  # (what stands before the number, first number, last number)
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,9})", name)
        text, number = (match[1], int(match[2])) if match else (name, None)
        if parts and number is not None and parts[-1][0] == text and parts[-1][2] == number - 1:
            parts[-1] = (text, parts[-1][1], number)
        else:
            parts.append((text, number, number))
    shown = [text if first is None else f"{text}{first}" if first == last else f"{text}{first}-{last}"
             for text, first, last in parts]
    return _some(shown, f"{len(names)} layers in all")


def device_list(titles: list[str]) -> str:
    """A few titles and how many there are."""
    return _some(list(titles), f"{len(titles)} devices in all")


def _some(texts, count):
    return ", ".join(texts if len(texts) <= NAMED + 1 else [*texts[:NAMED], f"... {count}"])


def _stages(found):
    return f"{count(found.problem.stages, 'stage')} ({found.problem.schedule})"


def _time(task, found):
    return f"{'latency' if task.request.objective == 'latency' else 'step'} {found.value_s:.4g} s"


def _dropped(task, best, fewer):
    working = {k for group in fewer.strategy.groups for k in group}
    return device_list([task.cluster.title(k) for group in best.strategy.groups for k in sorted(group)
                        if k not in working])
