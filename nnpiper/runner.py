"""The runner of the notebook chain: reads the notebooks' declarations, runs what changed, checks what they promised.

A notebook NN_name.ipynb declares itself in its metadata under "nnpiper" (see `Declaration`) and has one cell tagged
`parameters` with literals only, `mode`, `out` and `checkpoint` among them. It counts as done when its stamp is written:
after every cell ran and every declared output is there and new. The stamp holds the key, a hash over all that went in
(source, parameters, package, lock file, checkpoint, the files it reads), and the hashes of what came out.
"""

import ast
import hashlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import nbformat
import papermill
import psutil
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from traitlets.config import Config

from . import provenance
from .problem import write_text
from .report import RUNNER_PREFIX

RUNNER_MODULES = {"artifact.py", "cli.py", "provenance.py", "runner.py"}  # they change no result
# in `reads`: a file that an earlier notebook wrote; a file beside the checkpoint in use
OUT, BESIDE = "{out}/", "{checkpoint}/"
# manager-side CurveZMQ keys; without them every kernel of ipykernel 7 warns of unencrypted TCP
KERNEL_CONFIG = Config(KernelManager={"transport_encryption": "auto"})


class NotebookError(Exception):
    """A notebook is declared wrongly, failed, or broke a promise; says which one and why."""


class Declaration(BaseModel):
    """What a notebook says of itself.

    minutes, smoke_minutes: on two cores; memory_gb: peak of its kernel
    reads: files relative to the repository (data/x.json); {out}/tables/x.csv for the output of an earlier notebook,
        {checkpoint}/log.csv for a file beside the checkpoint in use (which itself needs no mention)
    writes: files relative to the output folder (tables/x.csv)
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    minutes: Annotated[float, Field(gt=0, le=600)]
    smoke_minutes: Annotated[float, Field(gt=0, le=600)]
    memory_gb: Annotated[float, Field(gt=0, le=1024)]
    reads: list[str]
    writes: Annotated[list[str], Field(min_length=1)]


@dataclass(frozen=True)
class Notebook:
    """One notebook of the chain: its file, declaration and the default values of its parameters."""

    path: Path
    says: Declaration
    parameters: dict

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.path.name[:2]

    def minutes(self, mode: str) -> float:
        return self.says.smoke_minutes if mode == "smoke" else self.says.minutes


@dataclass(frozen=True)
class Settings:
    """How the chain runs: root, the repository (holds nnpiper/ and requirements.lock); out, the output folder within
    it; mode; checkpoint, a file within root, and whether it is the shipped one (then the notebooks get "")."""

    root: Path
    out: Path
    mode: str
    checkpoint: Path
    shipped: bool = True
    force: bool = False

    @property
    def parameters(self) -> dict:
        checkpoint = "" if self.shipped else self.checkpoint.relative_to(self.root).as_posix()
        return {"mode": self.mode, "out": self.out.relative_to(self.root).as_posix(), "checkpoint": checkpoint}

    def stamp(self, notebook: Notebook) -> Path:
        return self.out / ".stamps" / f"{notebook.name}.json"

    def result(self, notebook: Notebook) -> Path:
        return self.out / "notebooks" / notebook.path.name

    def input_file(self, name: str) -> Path:
        for prefix, folder in ((OUT, self.out), (BESIDE, self.checkpoint.parent)):
            if name.startswith(prefix):
                return folder / name.removeprefix(prefix)
        return self.root / name


def read_chain(folder: Path) -> list[Notebook]:
    """The notebooks of a folder in the order of their numbers. Raises NotebookError."""
    chain = [read_notebook(path) for path in sorted(folder.glob("*.ipynb"))]
    if not chain:
        raise NotebookError(f"{folder}: no notebook")
    written, numbers = {}, set()
    for notebook in chain:
        if notebook.number in numbers:
            raise NotebookError(f"{notebook.name}: number {notebook.number} twice")
        numbers.add(notebook.number)
        for name in notebook.says.reads:
            if name.startswith(OUT) and name.removeprefix(OUT) not in written:
                raise NotebookError(f"{notebook.name}: reads {name}, which no earlier notebook writes")
        for name in notebook.says.writes:
            if Path(name).is_absolute() or ".." in Path(name).parts or name in written:
                raise NotebookError(f"{notebook.name}: writes {name}; allowed: a path within the output folder that no "
                                    f"other notebook writes ({written.get(name, 'none does')})")
            written[name] = notebook.name
    return chain


def read_notebook(path: Path) -> Notebook:
    """Declaration and parameters of one notebook. Raises NotebookError."""
    if not re.fullmatch(r"\d\d_\w+", path.stem):
        raise NotebookError(f"{path.name}: allowed: NN_name.ipynb")
    node = nbformat.read(path, as_version=4)
    try:
        says = Declaration.model_validate(node.metadata.get("nnpiper", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("metadata.nnpiper", *first["loc"])))
        raise NotebookError(f"{path.name}: {where}: {first['msg']}") from None
    cells = [cell for cell in node.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise NotebookError(f"{path.name}: {len(cells)} cells tagged parameters; allowed: 1")
    return Notebook(path, says, _literals(path, cells[0].source))


def check_parameters(notebook: Notebook, given: dict) -> None:
    """Raise NotebookError unless the notebook has every parameter that it is given, of the same type: papermill would
    only warn, and run with the default."""
    known = papermill.inspect_notebook(_unformatted(notebook.path))
    for name, value in given.items():
        if name not in known or name not in notebook.parameters:
            raise NotebookError(f"{notebook.name}: no parameter {name!r}; it has {', '.join(notebook.parameters)}")
        default = notebook.parameters[name]
        if type(value) is not type(default):
            raise NotebookError(f"{notebook.name}: parameter {name} = {value!r}; allowed: the type of {default!r}")


def inputs(notebook: Notebook, settings: Settings) -> dict[str, str]:
    """SHA-256 by name of all files that a notebook's results depend on. Raises NotebookError where one is missing."""
    package = hashlib.sha256()
    folder = settings.root / "nnpiper"
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name not in RUNNER_MODULES:
            package.update(f"{name} {provenance.hash_file(path)}\n".encode())
    hashes = {"nnpiper/": package.hexdigest()}
    for name in ("requirements.lock", BESIDE + settings.checkpoint.name, *notebook.says.reads):
        try:
            hashes[name] = provenance.hash_file(settings.input_file(name))
        except OSError as error:
            hint = "; run the chain from its start" if name.startswith(OUT) else ""
            raise NotebookError(f"{notebook.name}: reads {name}: {error.strerror}{hint}") from None
    return hashes


def key(notebook: Notebook, settings: Settings, hashes: dict[str, str]) -> str:
    """A hash over everything that went into a run of the notebook."""
    parts = [provenance.hash_file(notebook.path), settings.parameters, hashes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_current(notebook: Notebook, settings: Settings) -> bool:
    """Whether the notebook's last run had the same key and its outputs are still what that run wrote."""
    stamp = _read_json(settings.stamp(notebook))
    if stamp is None:
        return False
    try:
        hashes = inputs(notebook, settings)
    except NotebookError:
        return False
    return (stamp["key"] == key(notebook, settings, hashes)
            and settings.result(notebook).is_file()
            and stamp["outputs"].keys() == set(notebook.says.writes)
            and _unchanged(stamp["outputs"], settings))


def run_chain(chain: list[Notebook], settings: Settings, console: Console) -> None:
    """Run those notebooks that are not current, in order, one line each. Raises NotebookError at the first that fails;
    the next call goes on from there."""
    os.environ[RUNNER_PREFIX] = sys.prefix
    for notebook in chain:
        check_parameters(notebook, settings.parameters)
    width = max(len(notebook.name) for notebook in chain)
    for notebook in chain:
        if not settings.force and is_current(notebook, settings):
            console.print(f"{notebook.name:{width}}  up to date")
            continue
        with console.status(f"{notebook.name}: about {notebook.minutes(settings.mode):g} min"):
            record = run_notebook(notebook, settings)
        console.print(f"{notebook.name:{width}}  {record['wall_s'] / 60:5.1f} min  "
                      f"{record['peak_memory_bytes'] / 2**30:4.1f} GB")
        write_provenance(read_chain(notebook.path.parent), settings)


def run_notebook(notebook: Notebook, settings: Settings) -> dict:
    """Execute one notebook, check its promises, put the executed notebook into <out>/notebooks and write its stamp;
    return its record of provenance. A failed run is kept as *.failed.ipynb. Raises NotebookError."""
    hashes = inputs(notebook, settings)
    stamp, result = settings.stamp(notebook), settings.result(notebook)
    running, failed = result.with_suffix(".running.ipynb"), result.with_suffix(".failed.ipynb")
    for path in (stamp, running, failed):
        path.unlink(missing_ok=True)
    result.parent.mkdir(parents=True, exist_ok=True)
    before = {name: _state(settings.out / name) for name in notebook.says.writes}
    started, begin = datetime.now(UTC), time.perf_counter()
    try:
        with PeakMemory() as memory:
            # immediate: a gentle shutdown interrupts the idle kernel, which now and then reports that as an error
            node = papermill.execute_notebook(
                _unformatted(notebook.path), _unformatted(running), settings.parameters, kernel_name="python3",
                progress_bar=False, cwd=settings.root, config=KERNEL_CONFIG, shutdown_kernel="immediate")
        _check_promises(notebook, settings, node, before)
    except Exception as error:
        kept = ""
        if running.exists():
            os.replace(running, failed)
            kept = f" (kept as {failed})"
        raise NotebookError(f"{notebook.name}: {_reason(error, notebook)}{kept}") from error
    wall_s = time.perf_counter() - begin
    for name in ("input_path", "output_path"):  # paths of this machine
        node.metadata.papermill.pop(name, None)
    write_text(result, nbformat.writes(node))
    running.unlink()
    outputs = {name: provenance.hash_file(settings.out / name) for name in notebook.says.writes}
    record = {
        **provenance.commit(settings.root), "started": started.isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 1), "peak_memory_bytes": memory.peak_bytes,
        "parameters": {**notebook.parameters, **settings.parameters}, "inputs": hashes, "outputs": outputs,
        "environment": provenance.environment()}
    write_text(stamp, json.dumps({"key": key(notebook, settings, hashes), "outputs": outputs, "record": record}))
    return record


def write_provenance(chain: list[Notebook], settings: Settings) -> None:
    """<out>/provenance.json: the record of every notebook's last good run. Where a notebook has not run in this clone,
    the record that is there stays as long as what it tells of lies in <out>."""
    known = _read_json(settings.out / "provenance.json") or {}
    records = {}
    for notebook in chain:
        stamp = _read_json(settings.stamp(notebook))
        if stamp is not None:
            records[notebook.name] = stamp["record"]
        elif notebook.name in known and _unchanged(known[notebook.name]["outputs"], settings):
            records[notebook.name] = known[notebook.name]
    write_text(settings.out / "provenance.json", json.dumps(records, indent=1) + "\n")


class PeakMemory:
    """The most resident memory in bytes that the processes started inside the `with` held together, sampled."""

    def __init__(self, interval_s: float = 0.1):
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(self._interval_s):
            total = 0
            for child in psutil.Process().children(recursive=True):
                try:
                    total += child.memory_info().rss if child.pid not in self._before else 0
                except psutil.Error:  # it has just ended
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def _literals(path, source):
    """{name: value} of a parameters cell. Raises NotebookError for anything but `name = literal`: what is derived there
    would not follow the values that are injected below."""
    values = {}
    for line in ast.parse(source).body:
        try:
            name, = line.targets
            values[name.id] = ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            raise NotebookError(f"{path.name}: parameters cell: {ast.unparse(line)}; allowed: name = literal") from None
    return values


def _unformatted(path):
    """papermill formats paths with the parameters: a brace in a path stands for itself."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _check_promises(notebook, settings, node, before):
    for index, cell in enumerate(node.cells):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise NotebookError(f"cell {index} never ran")  # sys.exit(0) in a cell looks like success to papermill
    for name, state in before.items():
        now = _state(settings.out / name)
        if now is None:
            raise NotebookError(f"declared output {name} is missing")
        if now == state:
            raise NotebookError(f"declared output {name} was not written in this run")


def _state(path):
    """Differs after the file has been written again, whatever it says."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns


def _reason(error, notebook):
    if isinstance(error, DeadKernelError):
        return (f"the kernel died. Most often the system ended it for lack of memory (exit codes 137 and 138): this "
                f"notebook needs about {notebook.says.memory_gb:g} GB")
    if isinstance(error, PapermillExecutionError):
        return f"cell [{error.exec_count}]: {error.ename}: {error.evalue}"
    return str(error) or type(error).__name__


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None


def _unchanged(outputs, settings):
    return all(_hash_or_none(settings.out / name) == value for name, value in outputs.items())


def _hash_or_none(path):
    try:
        return provenance.hash_file(path)
    except OSError:
        return None
