"""Problem and Strategy: the arrays a planner reads and the answer it gives.

Symbols: L layers, K devices, S stages, M micro-batches. Everything is in SI units (seconds, bytes, bytes per second).
A layer index runs 0 .. L - 1, a device index 0 .. K - 1, a stage index 0 .. S - 1.
"""

import dataclasses
import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEDULES = ("1f1b", "gpipe")
TRANSFERS = ("blocking", "overlapped")

# shape of every array field of a problem, by dimension letter
SHAPES = {
    "forward_s": "LK",
    "backward_s": "LK",
    "output_bytes": "L",
    "stash_bytes": "L",
    "static_bytes": "L",
    "gradient_bytes": "L",
    "memory_bytes": "K",
    "bandwidth_bytes_per_s": "KK",
    "latency_s": "KK",
}


class InputError(ValueError):
    """Bad input: one line that names what is wrong, the value and what is allowed."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What a planner is asked: costs of every layer on every device, links, memory, S and M.

    forward_s, backward_s: [L, K] s per micro-batch of layer l on device k
    output_bytes, stash_bytes, static_bytes, gradient_bytes: [L] bytes (activation sent on, activation kept from F to
        B, weights + gradients + optimizer state, what replicas all-reduce once a step)
    memory_bytes: [K] usable bytes
    bandwidth_bytes_per_s, latency_s: [K, K] directed links, row = sender; the diagonal is not read
    stages S <= min(L, K), micro_batches M, schedule (one of SCHEDULES), transfers (one of TRANSFERS)

    Arrays are copied, made read-only and checked. Raises InputError.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    output_bytes: np.ndarray
    stash_bytes: np.ndarray
    static_bytes: np.ndarray
    gradient_bytes: np.ndarray
    memory_bytes: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    latency_s: np.ndarray
    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    transfers: str = "blocking"

    def __post_init__(self):
        sizes = {}
        for name, letters in SHAPES.items():
            array = _numbers(name, getattr(self, name), len(letters))
            for letter, size in zip(letters, array.shape):
                if sizes.setdefault(letter, size) != size:
                    raise InputError(f"{name}: shape {list(array.shape)} does not fit {letter} = {sizes[letter]}; "
                                     f"allowed: [{', '.join(letters)}]")
            if letters == "KK":
                # the diagonal is not read: a device reaches itself at no cost
                np.fill_diagonal(array, np.inf if name == "bandwidth_bytes_per_s" else 0.0)
            _check_values(name, array, positive=name == "bandwidth_bytes_per_s")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        limit = min(sizes["L"], sizes["K"])
        _check_count("stages", self.stages, limit, f"an integer from 1 to min(L, K) = {limit}")
        _check_count("micro_batches", self.micro_batches, MAX_MICRO_BATCHES,
                     f"an integer from 1 to {MAX_MICRO_BATCHES}")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("transfers", self.transfers, TRANSFERS)
        object.__setattr__(self, "stages", int(self.stages))
        object.__setattr__(self, "micro_batches", int(self.micro_batches))

    @property
    def layers(self) -> int:
        return self.forward_s.shape[0]

    @property
    def devices(self) -> int:
        return self.forward_s.shape[1]

    def replace(self, **changes) -> "Problem":
        """The same problem with some fields changed."""
        return dataclasses.replace(self, **changes)

    def without_memory_limit(self) -> "Problem":
        """The same problem with layers that take no memory, so that every strategy fits."""
        nothing = np.zeros(self.layers)
        return self.replace(static_bytes=nothing, stash_bytes=nothing, memory_bytes=np.ones(self.devices))

    def to_json(self) -> str:
        """The text of a problem file; the diagonal of the links is written as 0."""
        fields = {}
        for name in SHAPES:
            array = getattr(self, name)
            fields[name] = np.where(np.isfinite(array), array, 0.0).tolist()
        for name in ("stages", "micro_batches", "schedule", "transfers"):
            fields[name] = getattr(self, name)
        return json.dumps(fields)

    @classmethod
    def from_file(cls, path) -> "Problem":
        """Read a problem file (JSON, the fields of this class). Raises InputError that names file and field."""
        fields = read_json(path, _ProblemFile)
        try:
            return cls(**fields.model_dump())
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


MAX_MICRO_BATCHES = 65536  # keeps the op list of a step within memory


@dataclass(frozen=True)
class Strategy:
    """Which layers form each stage and which devices run it.

    cuts: S - 1 increasing layer indices; cut i is the first layer of stage i + 1
    groups: S disjoint, non-empty tuples of devices, ascending; several devices hold replicas of their stage

    >>> Strategy(cuts=(7, 13), groups=((3,), (4, 1), (0,))).text(26)
    '0-6@3 | 7-12@1,4 | 13-25@0'
    >>> Strategy.parse('0-6@3 | 7-12@1,4 | 13-25@0').cuts
    (7, 13)
    """

    cuts: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        try:
            cuts = tuple(index(cut) for cut in self.cuts)
            groups = tuple(tuple(sorted(index(k) for k in group)) for group in self.groups)
        except TypeError:
            raise InputError(f"strategy: cuts {self.cuts!r}, groups {self.groups!r}; "
                             "allowed: integers, and groups of integers") from None
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "groups", groups)

    def bounds(self, layers: int) -> tuple[int, ...]:
        """[S + 1] stage s holds the layers bounds[s] .. bounds[s + 1] - 1."""
        return (0, *self.cuts, layers)

    def text(self, layers: int) -> str:
        """One line, `first-last@device,device` a stage; parses back with `parse`."""
        bounds = self.bounds(layers)
        return " | ".join(f"{bounds[s]}-{bounds[s + 1] - 1}@{','.join(map(str, group))}"
                          for s, group in enumerate(self.groups))

    @classmethod
    def parse(cls, text: str, layers: int | None = None) -> "Strategy":
        """The strategy that a line of `text` says. Raises InputError where it is malformed, skips a layer, or does not
        end with the last of `layers`, if given."""
        cuts, groups, expected = [], [], 0
        for part in text.split("|"):
            # space around a sign is of no account, but between two digits a sign is missing
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?@(\d{1,9}(?:,\d{1,9})*)",
                                 re.sub(r"\s*([-@,])\s*", r"\1", part.strip()), re.ASCII)
            if not match:
                raise InputError(f"strategy: stage {part.strip()!r}; allowed: first-last@device,device")
            first, last = int(match[1]), int(match[2] or match[1])
            if first != expected or last < first:
                raise InputError(f"strategy: stage {part.strip()!r} starts at layer {first}; allowed: {expected}-"
                                 "last with last >= first, so that each layer is in exactly one stage")
            cuts.append(first)
            groups.append(tuple(int(k) for k in match[3].split(",")))
            expected = last + 1
        if layers is not None and expected != layers:
            raise InputError(f"strategy: last layer {expected - 1}; allowed: {layers - 1}")
        return cls(tuple(cuts[1:]), tuple(groups))

    @classmethod
    def from_file(cls, path) -> "Strategy":
        """Read a strategy file: JSON with `cuts` and `groups`. Raises InputError."""
        fields = read_json(path, _StrategyFile)
        return cls(tuple(fields.cuts), tuple(map(tuple, fields.groups)))

    def check(self, problem: Problem) -> None:
        """Raise InputError unless this is a valid strategy of the problem. Memory is not looked at here."""
        self.check_sizes(problem.layers, problem.devices, problem.stages)

    def check_sizes(self, L: int, K: int, S: int) -> None:
        """Raise InputError unless this is S non-empty stages that hold each of L layers once, on S non-empty groups of
        K known devices, no device twice."""
        if len(self.groups) != S or len(self.cuts) != S - 1:
            raise InputError(f"strategy: {len(self.groups)} groups and {len(self.cuts)} cuts; "
                             f"allowed: {S} groups and {S - 1} cuts for {S} stages")
        bounds = self.bounds(L)
        if any(right <= left for left, right in zip(bounds, bounds[1:])):
            raise InputError(f"strategy: cuts {list(self.cuts)}; allowed: increasing layer indices from 1 to {L - 1}")
        if any(not group for group in self.groups):
            raise InputError(f"strategy: groups {[list(g) for g in self.groups]}; allowed: no empty group")
        devices = [k for group in self.groups for k in group]
        unknown = [k for k in devices if not 0 <= k < K]
        if unknown:
            raise InputError(f"strategy: device {unknown[0]}; allowed: 0 to {K - 1}")
        if len(set(devices)) < len(devices):
            raise InputError(f"strategy: groups {[list(g) for g in self.groups]}; allowed: no device twice")


_Number = Annotated[float, Field(strict=True)]
_Vector = list[_Number]
_Matrix = list[_Vector]
_Count = Annotated[int, Field(strict=True)]


class _ProblemFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    forward_s: _Matrix
    backward_s: _Matrix
    output_bytes: _Vector
    stash_bytes: _Vector
    static_bytes: _Vector
    gradient_bytes: _Vector
    memory_bytes: _Vector
    bandwidth_bytes_per_s: _Matrix
    latency_s: _Matrix
    stages: _Count
    micro_batches: _Count
    schedule: Literal[SCHEDULES] = "1f1b"
    transfers: Literal[TRANSFERS] = "blocking"


class _StrategyFile(BaseModel):  # further fields are let pass: a line of `nnpiper solve --json` is a strategy file, too
    cuts: list[_Count]
    groups: list[list[_Count]]


def read_json(path, model: type[BaseModel]) -> BaseModel:
    """Read a JSON file into a pydantic model. Raises InputError: one line with file, field, value, what is allowed."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                         "allowed: a UTF-8 JSON file") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = " ".join(".".join(map(str, first["loc"])).split()) or "the file"
        if first["type"] == "missing":
            raise InputError(f"{path}: {field}: missing; allowed: a value") from None
        value = json.dumps(first["input"], default=str)
        value = value if len(value) <= 60 else value[:57] + "..."
        top = first["type"] == "extra_forbidden" and len(first["loc"]) == 1
        allowed = f"; allowed fields: {', '.join(model.model_fields)}" if top else ""
        allowed = "; allowed: JSON" if first["type"] == "json_invalid" else allowed
        raise InputError(f"{path}: {field}: {value}: {first['msg']}{allowed}") from None


MAX_FILE_BYTES = 1 << 28


def read_text(path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, or of what is piped in (/dev/stdin, /dev/fd/N).
    Raises OSError or ValueError; what could keep a reader waiting for ever, such as a FIFO, is refused."""
    status = os.stat(path)
    piped = str(path) == "/dev/stdin" or str(path).startswith("/dev/fd/")  # what a shell writes for <(command)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or piped):
        raise ValueError("not a regular file")
    too_large = ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    if status.st_size > MAX_FILE_BYTES:
        raise too_large
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise too_large
    return data.decode("utf-8-sig")


def write_text(path, text: str) -> None:
    """Write a whole UTF-8 file or nothing."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path, data: bytes) -> None:
    """Write a whole file or nothing: to a temporary name first, then renamed. Raises OSError, also for a device or
    FIFO, which renaming would replace."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _numbers(name, value, dimensions):
    try:
        array = np.array(value, order="C")
    except (TypeError, ValueError):
        array = np.array(None)
    if array.dtype.kind not in "iuf":
        raise InputError(f"{name}: not an array of numbers, or rows of unequal length; "
                         f"allowed: {dimensions} dimension(s) of numbers")
    if array.ndim != dimensions or array.size == 0:
        raise InputError(f"{name}: shape {list(array.shape)}; allowed: {dimensions} non-empty dimension(s)")
    return array.astype(np.float64)


# Larger numbers would overflow when products of them are summed; no real cost or size comes near.
MAX_VALUE = 1e30
MIN_BANDWIDTH = 1e-6


def _check_values(name, array, positive):
    not_read = np.isinf(array) & np.eye(*array.shape, dtype=bool) if positive else np.zeros(array.shape, bool)
    low = MIN_BANDWIDTH if positive else 0.0
    wrong = ~((array >= low) & (array <= MAX_VALUE)) & ~not_read
    if wrong.any():
        where = np.argwhere(wrong)[0].tolist()
        raise InputError(f"{name}{where}: {array[tuple(where)]}; "
                         f"allowed: a finite number from {low:g} to {MAX_VALUE:g}")


def _check_count(name, value, limit, allowed):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= limit:
        raise InputError(f"{name}: {value!r}; allowed: {allowed}")


def check_folder(option: str, path: Path) -> None:
    """Raise InputError where the folder that an option names is a file."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{option}: {path} is a file; allowed: a folder")


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raise InputError unless the value of a field is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name}: {value!r}; allowed: {', '.join(choices)}")
