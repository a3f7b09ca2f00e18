"""The command that measures plans in a real pipeline engine on an emulated cluster: engine. Exit codes are those of
`cli`, and 1 where the emulated cluster breaks."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(engine)


def engine(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Write the raw measurements here.")] = Path("runs/engine"),
    smoke: Annotated[bool, typer.Option("--smoke", help="Two strategies and one problem.")] = False,
) -> int:
    """Run plans with torch.distributed.pipelining on an emulated cluster (one network namespace a stage, a bandwidth
    for every directed pair): measured steps beside predicted ones. Takes 6 minutes; needs ip, tc, unshare, and user
    namespaces or root."""
    from rich.console import Console

    from .engine import studies, tables
    from .engine.emulator import EmulatorError
    from .paths import CHECKPOINT
    from .problem import InputError, check_folder
    from .report import markdown_text

    check_folder("--out", out)
    out.mkdir(parents=True, exist_ok=True)  # before 6 minutes of measuring, not after
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"--out: {out}; allowed: a folder that may be written to")
    try:
        found, facts = studies.measure_all(CHECKPOINT, smoke)
    except EmulatorError as error:
        print(f"nnpiper: {error}", file=sys.stderr)
        return 1
    studies.save(found, facts, out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    fidelity, steps = tables.fidelity(found["fidelity"]), tables.steps(found["speedups"])
    for table in (tables.fidelity_summary(fidelity), tables.order(found["order"]), tables.speedups(steps),
                  tables.targets(fidelity, steps, tables.TOO_FEW if smoke else "")):
        console.print(markdown_text(table))
    print(f"raw measurements: {out}/")
    return 0
