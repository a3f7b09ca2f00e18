"""What a cluster file may hold: its schema, the spellings of the catalogue's names, and the messages for all else.

`cluster_file` describes the form and makes a cluster of it.
"""

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from .cluster import DEVICES, LINKS, MAX_DEVICES, RESERVE
from .problem import InputError, read_text

# What may be written, in the units of the file; all of it lies well within what a Problem takes.
TFLOPS = (1e-6, 1e6)
EFFICIENCY = (1e-3, 1)
GIGABYTES = (1e-3, 1e6)
GIGABYTES_PER_S = (1e-6, 1e6)  # and gigabits
MICROSECONDS = (0, 1e9)


def _plain(text):
    return re.sub(r"\.0\b|nvidia|geforce|tesla|rtx|x16|[\W_]|gb$", "", text.lower())


def _spellings(catalogue):
    return {_plain(text): name for name, entry in catalogue.items() for text in (name, entry.title)}


_DEVICE_SPELLINGS, _LINK_SPELLINGS = _spellings(DEVICES), _spellings(LINKS)


def device_name(text: str) -> str | None:
    """The catalogue's name of a device, or None. Case, punctuation and words such as GeForce do not matter.

    >>> device_name("NVIDIA GeForce RTX 3090"), device_name("Tesla V100-SXM2-32GB"), device_name("A100")
    ('rtx3090', 'v100-32', None)
    """
    return _DEVICE_SPELLINGS.get(_plain(text))


def link_name(text: str) -> str | None:
    """The catalogue's name of a link class, or None.

    >>> link_name("PCIe 3.0 x16"), link_name("25 GbE"), link_name("25 Gb/s")
    ('pcie3', '25gbe', None)
    """
    return _LINK_SPELLINGS.get(_plain(text))


# Schema. A field's description is what messages call allowed. None, the default of some, cannot be written.

UNITS = '"GB/s" (10^9 bytes a second) or "Gb/s" (10^9 bits a second), one way, and us (latency in microseconds)'
NO_UNIT = "a bandwidth without its unit may be meant in bytes or in bits, a factor of 8"


class Reached(NamedTuple):
    """What a link reaches, one way."""

    bytes_per_s: float
    latency_s: float


def _number(limits, unit):
    low, high = limits
    return Annotated[float, Field(ge=low, le=high, allow_inf_nan=False,
                                  description=f"{unit} from {low:g} to {high:g}")]


def _name(text):
    if not re.fullmatch(r"[\w.+/-]{1,60}", text) or text.isdigit():
        raise ValueError("not a name")
    return text


def _title(text):
    if not 1 <= len(text) <= 60 or not text.isprintable() or text != text.strip():
        raise ValueError("not a title")
    return text


def _path(text):
    if not 1 <= len(text) <= 1000 or not text.isprintable():
        raise ValueError("not a path")
    return text


def _link(value, check):
    """Reached, by the name of a class or by figures, which `check` reads."""
    if isinstance(value, str):
        if link_name(value) is None:
            raise ValueError(f"no link class of the catalogue{hint(value, LINKS)}")
        link = LINKS[link_name(value)]
        return Reached(link.bytes_per_s, link.latency_s)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(NO_UNIT)
    figures = check(value)
    gigabytes = figures.gigabits / 8 if figures.gigabytes is None else figures.gigabytes
    return Reached(gigabytes * 1e9, figures.us * 1e-6)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Name = Annotated[str, AfterValidator(_name),
                  Field(description="1 to 60 letters, digits and . _ + - /, not digits alone")]


class DeviceEntry(_Table):
    device: Annotated[str, AfterValidator(_title),
                      Field(description="1 to 60 printable characters, no space at the ends")] = None
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES, description=f"an integer from 1 to {MAX_DEVICES}")] = 1
    node: _Name = None
    name: _Name = None
    achieved_TFLOPS: _number(TFLOPS, "TFLOP/s") = None
    peak_TFLOPS: _number(TFLOPS, "TFLOP/s") = None
    efficiency: _number(EFFICIENCY, "a fraction") = None
    memory_GB: _number(GIGABYTES, "GB (10^9 bytes)") = None
    profile: Annotated[str, AfterValidator(_path),
                       Field(description="the path of a profile file, relative to this file")] = None


class _Bandwidth(_Table):
    @model_validator(mode="after")
    def _one_unit(self):
        if (self.gigabytes is None) == (self.gigabits is None):
            raise ValueError("no bandwidth" if self.gigabytes is None else "GB/s and Gb/s at once")
        return self


class _Figures(_Bandwidth):
    gigabytes: _number(GIGABYTES_PER_S, "10^9 bytes a second") = Field(None, alias="GB/s")
    gigabits: _number(GIGABYTES_PER_S, "10^9 bits a second") = Field(None, alias="Gb/s")
    us: _number(MICROSECONDS, "microseconds")


_Row = Annotated[list[float], Field(fail_fast=True)]
_Rows = Annotated[list[_Row], Field(fail_fast=True, description="K rows of K numbers, row = sender")]


class _Matrix(_Bandwidth):
    gigabytes: _Rows = Field(None, alias="GB/s")
    gigabits: _Rows = Field(None, alias="Gb/s")
    us: _Rows


_Link = Annotated[_Figures, WrapValidator(_link),
                  Field(description=f"one of {', '.join(LINKS)}, or a table of what is reached: {UNITS}")]


class _Pair(_Table):
    ends: Annotated[list[str], Field(min_length=2, max_length=2, description="two names of nodes or devices")]
    link: _Link
    one_way: Annotated[bool, Field(description="true or false")] = False


def _tables(table, **field):
    return Field(fail_fast=True, description=f"a list of tables of {', '.join(table.model_fields)}", **field)


class Links(_Table):
    inside: _Link = None
    between: _Link = None
    pairs: Annotated[list[_Pair], _tables(_Pair)] = []
    matrix: Annotated[_Matrix, Field(description=f"a table of K x K matrices: {UNITS}")] = None


class File(_Table):
    devices: Annotated[list[DeviceEntry], _tables(DeviceEntry, min_length=1)]
    links: Annotated[Links, Field(description=f"a table of {', '.join(Links.model_fields)}")] = Links()
    reserve: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False,
                                    description="a fraction from 0 to below 1")] = RESERVE


_TABLES = {  # by the keys that lead to them
    (): File, ("devices",): DeviceEntry, ("links",): Links, ("links", "inside"): _Figures,
    ("links", "between"): _Figures, ("links", "pairs"): _Pair, ("links", "pairs", "link"): _Figures,
    ("links", "matrix"): _Matrix,
}


# Reading and messages


def read(path) -> dict:
    """The document of a TOML or JSON file. Raises InputError."""
    parse, allowed = {
        ".toml": (tomllib.loads, 'TOML, with units as quoted keys, "GB/s" = 12.5'), ".json": (_loads_json, "JSON"),
    }.get(Path(path).suffix.lower(), (None, None))
    if parse is None:
        raise InputError("not a cluster file by its name; allowed: a file *.toml or *.json")
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}; "
                         "allowed: a UTF-8 file") from None
    try:
        return parse(text)
    except RecursionError:
        raise InputError(f"cannot be read: nested too deep; allowed: {allowed}") from None
    except ValueError as error:
        raise InputError(f"cannot be read: {' '.join(str(error).split())}; allowed: {allowed}") from None


def _loads_json(text):
    def table(items):
        keys = set()
        for key, _ in items:
            if key in keys:  # TOML refuses this itself
                raise ValueError(f"key {shown(key)} twice in one table")
            keys.add(key)
        return dict(items)
    return json.loads(text, object_pairs_hook=table)


def check(document) -> File:
    """The document as a File. Raises InputError with field, value and what is allowed."""
    try:
        return File.model_validate(document)
    except ValidationError as error:
        raise InputError(_message(error)) from None


def _message(invalid):
    """One line for the first of pydantic's errors; unknown keys come first, since they explain missing ones."""
    error = min(invalid.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    reason = {"model_type": "not a table", "value_error": str(error.get("ctx", {}).get("error"))}.get(
        error["type"], error["msg"])
    keys = tuple(part for part in error["loc"] if isinstance(part, str))
    if not keys:
        return f"the file: {shown(error['input'])}: {reason}; allowed: a table of {', '.join(File.model_fields)}"
    where = ".".join(part if part.isprintable() and len(part) <= 60 else shown(part)
                     for part in map(str, error["loc"]))
    table = _TABLES[keys[:-1]]
    fields = {field.alias or name: field for name, field in table.model_fields.items()}
    if error["type"] == "extra_forbidden":
        if not issubclass(table, _Bandwidth):
            return f"{where}: unknown key{hint(keys[-1], fields)}; allowed: {', '.join(fields)}"
        guess = (f": {NO_UNIT}" if re.search("band|rate|speed|[kmgt]i?b", keys[-1].lower())
                 else hint(keys[-1], fields))
        return f"{where}: unknown key{guess}; allowed: {UNITS}"
    allowed = fields[keys[-1]].description
    if error["type"] == "missing":
        return f"{where}: missing; allowed: {allowed}"
    return f"{where}: {shown(error['input'])}: {reason}; allowed: {allowed}"


def shown(value) -> str:
    """A value for a message: one line, of bounded length, printable."""
    try:
        text = repr(value)
    except ValueError:  # an integer that Python does not print
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def hint(word: str, known) -> str:
    """' (did you mean ...?)' with the known names that begin so, or else the nearest, or nothing."""
    word = word[:60].lower()
    plain = {name.lower(): name for name in known}
    near = [name for name in plain if word and name.startswith(word)][:3]
    near = near or difflib.get_close_matches(word, plain, n=1, cutoff=0.4)
    return f" (did you mean {' or '.join(repr(plain[name]) for name in near)}?)" if near else ""
