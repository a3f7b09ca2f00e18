"""Documents that break what can break: hostile values, right documents changed, bytes spoiled, things that are no file.

Documents are Python values, written as JSON or TOML; `Raw` stands for text that is written as it is.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Raw(NamedTuple):
    text: str


NUMBERS = (0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**400, 0.5, 1.5, -0.0, 5e-324, 1e-300, 1e-30, 1e-6, 1e6, 1e30, 1e300,
           -1e300, float("nan"), float("inf"), -float("inf"), True, Raw("1_000"), Raw("٣"), Raw("0x10"), Raw("1e999"),
           Raw("1979-05-27"), Raw("9" * 5000))
TEXTS = ("", " ", "0", "1_000", "٣", "nan", "1e300", "名前 ñ 🚀", "\u202eכן\u2066", "a\x00b", "\x1b[31mred",
         "a\nb\u2028c", "\ud800", "x" * 5000, "../..", "/dev/null", "$(ls); `ls`", "{0} %s %n", "gpu0", "null",
         "a" * 61, "ⅷ", "\u00e9", "e\u0301")
SHAPES = (None, [], {}, [[]], [None], {"": 0}, Raw("[" * 60 + "]" * 60), Raw("[" * 20_000), Raw('{"a":' * 5000))
FILE_KINDS = ("directory", "fifo", "link to itself", "missing", "device", "endless", "empty", "huge")


def text(value, toml: bool = False) -> str:
    """The value as JSON or as a TOML value, strings escaped."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        inside = ", ".join(f"{text(str(key), toml)}{' = ' if toml else ': '}{text(item, toml)}"
                           for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(text(item, toml) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not toml)
    if toml and isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def document(value, toml: bool = False) -> bytes:
    """A whole file of it. Lone surrogates become bytes that are not UTF-8 in TOML, and escapes in JSON."""
    if toml and isinstance(value, dict):
        return "".join(f"{text(str(key), True)} = {text(item, True)}\n" for key, item in value.items()).encode(
            "utf-8", "surrogatepass")
    return text(value, toml).encode("utf-8", "surrogatepass")


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def chance(rng, share: float) -> bool:
    return bool(rng.random() < share)


def log_uniform(rng, low: float, high: float) -> float:
    """Now and then an end of the range itself."""
    if chance(rng, 0.1):
        return float(pick(rng, (low, high)))
    return float(min(max(np.exp(rng.uniform(np.log(low), np.log(high))), low), high))


def anything(rng):
    return pick(rng, pick(rng, (NUMBERS, NUMBERS, TEXTS, SHAPES)))


def mutated(rng, value):
    """A deep copy with one to three things in it changed, removed, renamed, repeated or swapped."""
    value = json.loads(json.dumps(value))
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(value))
        if not places:
            return anything(rng)
        holder, key = pick(rng, places)
        action = int(rng.integers(7))
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            name = pick(rng, (key[:-1], key.upper(), f"{key} ", f"{key}s", "", pick(rng, TEXTS)))
            holder[name] = holder.pop(key)
        elif action == 2 and isinstance(holder, dict):
            holder[pick(rng, ("extra", "gpus", "bandwidth", pick(rng, TEXTS)))] = anything(rng)
        elif action == 2:
            holder.insert(key, holder[key])
        elif action == 3:
            other, other_key = pick(rng, places)
            holder[key] = json.loads(json.dumps(other[other_key], default=str))
        elif action == 4 and isinstance(holder[key], (int, float)) and abs(holder[key]) < 1e300:
            holder[key] = holder[key] * pick(rng, (-1, 0, 1e-9, 1e3, 1e9, 1e30))
        else:
            holder[key] = anything(rng)
    return value


def _places(value):
    """(holder, key) of everything in a document; of a long list the first few and the last."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if len(keys) <= 20 else [*keys[:4], keys[-1]]:
        yield value, key
        if isinstance(value[key], (dict, list)) and not isinstance(value[key], Raw):
            yield from _places(value[key])


def spoiled(rng, data: bytes) -> bytes:
    """Bytes cut short, flipped, inserted, repeated, or in another encoding."""
    middle = int(rng.integers(len(data) + 1))
    end = int(rng.integers(middle, len(data) + 1))
    flipped = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        flipped[int(rng.integers(len(data)))] = int(rng.integers(256))
    as_text = data.decode("utf-8", "replace")
    return pick(rng, (
        data[:middle], data[middle:], data[:middle] + data[end:], data[:end] + data[middle:], data + data, b"",
        bytes(flipped), data[:middle] + b"\x00" + data[middle:], data[:middle] + b"\xff\xfe" + data[middle:],
        data + b"\x1a", as_text.encode("utf-16"), as_text.encode("latin-1", "replace"), b"[" + data + b"]",
        data.replace(b'"', b"'"), data.replace(b":", b"="), data.replace(b",", b",,", 1), data.upper(),
        data.replace(b"0", "٠".encode()), b" " * 10_000 + data))


def write(rng, path: Path, value, toml: bool = False, share: float = 0.5) -> bool:
    """Write a document; with probability `share` something is wrong with it. Returns whether nothing was changed; a
    byte order mark, line ends of another system and space at the end are no change."""
    changed = chance(rng, share)
    if changed and chance(rng, 0.15):
        place(pick(rng, FILE_KINDS), path, document(value, toml))
        return False
    data = document(mutated(rng, value) if changed and chance(rng, 0.75) else value, toml)
    if changed and chance(rng, 0.3):
        data = spoiled(rng, data)
    if not changed:
        data = pick(rng, (data, data, b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), data + b"\n\n"))
    path.write_bytes(data)
    return not changed


def place(kind: str, path: Path, data: bytes) -> None:
    """Put something of FILE_KINDS at the path that cannot be read as a file, or not to its end."""
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind in ("device", "endless"):
        path.symlink_to("/dev/null" if kind == "device" else "/dev/zero")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "huge":
        path.write_bytes(data)
        os.truncate(path, 1 << 36)  # a hole: it takes no room
