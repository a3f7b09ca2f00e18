"""The artifact's one command: options, what will run and for how long, training on request, the chain, the claims.

reproduce.sh calls this module twice: before anything is installed, to check the options (so it imports the standard
library alone), and in .venv, to do the work.
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .paths import CHECKPOINT, DATA, FIGURES, ROOT

NOTEBOOKS = ROOT / "notebooks"
# what training depends on: another version of these starts it anew instead of resuming
TRAINING_MODULES = ("batch", "checkpoint", "cost", "critical_path", "features", "kernels", "losses", "memory", "moves",
                    "network", "paths", "problem", "readings", "sampling", "schedule", "search", "simulator", "starts",
                    "vcta", "virtual", "xorshift")  # all that vcta imports

DESCRIPTION = """Regenerate every table and figure of the artifact into figures/ and print the claims table.

  ./reproduce.sh               the whole chain on the shipped checkpoint
  ./reproduce.sh test [...]    the tests (arguments go to pytest)

The first call makes .venv and installs the locked packages. A second run does only what changed; a killed run resumes.
Exit codes: 0 done, 1 a notebook failed, an output is missing or a claim's check broke, 2 bad usage.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(_fail(f"{message} (see ./reproduce.sh --help)"))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of reproduce.sh. Exits with 2 and one line where they are wrong."""
    parser = _Parser(prog="./reproduce.sh", description=DESCRIPTION, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_true", help="everything in small, into figures/smoke/ (5 minutes)")
    size.add_argument("--retrain", action="store_true",
                      help="first train anew, as the shipped checkpoint was trained (40 to 60 minutes more), and "
                           "evaluate that checkpoint, into figures/retrain/")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--from", dest="first", metavar="NN", type=_number, help="leave out the notebooks before NN")
    part.add_argument("--only", metavar="NN", type=_number, help="run notebook NN alone")
    parser.add_argument("--force", action="store_true", help="run notebooks that are up to date, too")
    parser.add_argument("--clean", action="store_true",
                        help="delete what the chain wrote (figures/, or the folder of --smoke, --retrain) and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Do what reproduce.sh was asked; returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    out = FIGURES / ("smoke" if options.smoke else "retrain" if options.retrain else "")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except OSError:
            return _fail(f"{out.relative_to(ROOT)}: another run is writing here; allowed: one at a time")
        if options.clean:
            clean(out)
            return 0
        try:
            return _reproduce(options, out)
        except KeyboardInterrupt:
            print("interrupted; the next run goes on from here", file=sys.stderr)
            return 130


def clean(out: Path) -> None:
    """Delete everything in an output folder but the output folders inside it."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path not in (FIGURES / "smoke", FIGURES / "retrain"):
                shutil.rmtree(path)
        else:
            path.unlink()


def train_checkpoint(out: Path) -> Path:
    """Train by the shipped checkpoint's command, or go on where a killed training stopped; returns the checkpoint. Raises
    subprocess.CalledProcessError."""
    from . import provenance
    from .problem import write_text

    folder, command = out / "checkpoint", shlex.split(_card()["command"])
    sources = [ROOT / "nnpiper" / f"{name}.py" for name in TRAINING_MODULES]
    made_from = "\n".join([*command, *map(provenance.hash_file, [*sources, ROOT / "requirements.lock"])])
    stamp = folder / "made_from.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        write_text(stamp, made_from)
    program = Path(sys.executable).parent / command[0]  # nnpiper or torchrun
    # the processes share the cores: more threads in each would wait for one another
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([program, *command[1:], "--out", folder], cwd=ROOT, check=True, env=environment)
    return folder / CHECKPOINT.name


def _reproduce(options, out):
    from rich.console import Console

    from .engine.links import access
    from .runner import NotebookError, Settings, is_current, read_chain, run_chain
    from .problem import InputError

    console = Console(highlight=False, soft_wrap=True)
    try:
        whole = read_chain(NOTEBOOKS)
        chain = [n for n in whole if (options.first or "00") <= n.number and options.only in (None, n.number)]
        if not chain:
            return _fail(f"notebook {options.first or options.only}; allowed: {whole[0].number} to {whole[-1].number}")
        mode = "smoke" if options.smoke else "full"
        settings = Settings(ROOT, out, mode, CHECKPOINT, force=options.force)
        todo = [n for n in chain if options.force or options.retrain or not is_current(n, settings)]
        minutes = sum(n.minutes(mode) for n in todo) + (_card()["minutes"] if options.retrain else 0)
        memory = max((n.says.memory_gb for n in todo), default=0)
        console.print(f"{len(todo)} of {len(chain)} notebooks to run into {out.relative_to(ROOT)}/: "
                      f"about {minutes:.0f} minutes on two cores, {memory:g} GB of memory at most")
        engine = [n.number for n in todo if "engine" in n.name]
        if engine and (lacking := access().lacking):
            console.print(f"no emulated cluster here: {lacking}; notebook {engine[0]} shows the shipped measurements")
        if options.retrain:
            settings = Settings(ROOT, out, mode, train_checkpoint(out), shipped=False, force=options.force)
        run_chain(chain, settings, console)
        claimant = next((n for n in whole if "claims.json" in n.says.writes), None)
        if claimant is None or not is_current(claimant, settings):
            console.print("the claims table is not up to date: run ./reproduce.sh without --from and --only")
            return 0
        return _report_claims(out, mode, console)
    except (NotebookError, InputError) as error:
        return _fail(str(error), 1)
    except subprocess.CalledProcessError as error:
        return _fail(f"training failed with exit code {error.returncode}; the next run goes on from its last "
                     "checkpoint", 1)


def _card():
    """What the shipped checkpoint's card says."""
    return json.loads(CHECKPOINT.with_suffix(".json").read_text(encoding="utf-8"))


def _report_claims(out, mode, console):
    """Print the claims in short and every broken check. In small, verdicts are not compared with those on record."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from .claims import broken_checks, read_claims

    listed, path = read_claims(DATA / "claims.json"), out / "claims.json"
    found = {row["id"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    table = Table("claim", "measure", "bound", "this artifact", "verdict", box=box.SIMPLE_HEAD)
    for claim in listed:
        row = found.get(claim.id, {"number": None, "verdict": "absent"})
        number = "-" if row["number"] is None else f"{row['number']:.4g} {claim.unit}"
        table.add_row(claim.id, claim.measure, claim.bound, number, row["verdict"])
    Console(highlight=False, markup=False).print(table)
    folder = out.relative_to(ROOT)
    if mode == "smoke":
        console.print("a smoke run: far too few problems for these numbers to be results")
    console.print(f"in full: {folder}/claims.md; tables, figures and provenance.json: {folder}/")
    broken = broken_checks(listed, path, compare_verdicts=mode == "full")
    for line in broken:
        print(f"check broken: {line}", file=sys.stderr)
    return 1 if broken else 0


def _number(text):
    if not re.fullmatch(r"\d\d?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: the number of a notebook, as 05")
    return f"{int(text):02d}"


def _fail(message, code=2):
    print(f"reproduce.sh: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
