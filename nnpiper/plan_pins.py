"""Pins: layers that a user wants on certain devices, each stage with a pin on its device alone.

Symbols: L layers, K devices, S stages.
"""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from .problem import InputError, Problem, Strategy


def numbered(pins: Mapping[int | str, int | str], layer_names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """{layer: device} by number, ascending. Raises InputError for unknown or repeated layers, unknown devices, and
    pins that would need a device in two stages."""
    numbers = {}
    for layer, device in pins.items():
        number = _number("pins: layer", layer, layer_names)
        if number in numbers:
            raise InputError(f"pins: layer {layer!r} twice; allowed: one device a layer")
        numbers[number] = _number("pins: device", device, labels)
    ordered = dict(sorted(numbers.items()))
    left = set()
    for before, device in zip([None, *ordered.values()], ordered.values()):
        if device != before:
            if device in left:
                raise InputError(f"pins: device {labels[device]!r} for layers on both sides of another pin; allowed: "
                                 "layers in a row, as each device runs one stage")
            left.add(device)
    return ordered


def stages_allowed(pins: Mapping[int, int], L: int) -> tuple[int, int]:
    """The least and the greatest S for which pins can be kept; (1, L) without pins."""
    return max(len(set(pins.values())), 1), L - sum(last - first for first, last in _spans(pins))


def start(problem: Problem, pins: Mapping[int, int]) -> Strategy:
    """A plain strategy that keeps pins for which S is allowed: stages cut halfway between the pins of two devices, and
    further cuts evenly spread; the stages without a pin get the devices with the most memory."""
    S, spans = problem.stages, _spans(pins)
    cuts = {(last + first + 1) // 2 for (_, last), (first, _) in zip(spans, spans[1:])}
    inside = {layer for first, last in spans for layer in range(first + 1, last + 1)}
    free = [layer for layer in range(1, problem.layers) if layer not in cuts | inside]
    missing = S - 1 - len(cuts)
    cuts |= {free[int((i + 0.5) * len(free) / missing)] for i in range(missing)}
    bounds, groups = [0, *sorted(cuts)], [None] * S
    for layer, device in pins.items():
        groups[int(np.searchsorted(bounds, layer, side="right")) - 1] = (device,)
    others = [(int(k),) for k in np.argsort(-problem.memory_bytes, kind="stable") if k not in pins.values()]
    return Strategy(tuple(bounds[1:]), tuple(group or others.pop(0) for group in groups))


def _spans(pins):
    """(first, last) layer of the pins of each device, in order; pins are ascending."""
    spans = {}
    for layer, device in pins.items():
        spans[device] = (spans.get(device, (layer,))[0], layer)
    return list(spans.values())


def _number(field, value, names):
    """The place of a name, which may be that number itself."""
    if isinstance(value, str):
        if value in names:
            return names.index(value)
        lower = [name.lower() for name in names]
        if lower.count(value.strip().lower()) == 1:
            return lower.index(value.strip().lower())
        if value.isascii() and value.isdecimal() and len(value) < 10:
            value = int(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= value < len(names):
        return int(value)
    near = difflib.get_close_matches(str(value)[:60].lower(), names, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    shown = ", ".join(names[:4]) + (f" .. {names[-1]}" if len(names) > 4 else "")
    raise InputError(f"{field} {value!r}{hint}; allowed: 0 to {len(names) - 1}, or a name: {shown}")
