"""What a notebook opens with and saves with: its output folder, tables, figures, timings, claims.

Tables are written as csv, md and tex, figures as pdf, png and the csv behind them, all in the same bytes for the same
numbers. Wall times differ between runs, so they lie apart, in the folder timings/.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from . import claims, plots
from .paths import CHECKPOINT, DATA, FIGURES, ROOT
from .problem import InputError, write_text

MODES = ("full", "smoke")
RUNNER_PREFIX = "NNPIPER_RUNNER_PREFIX"  # the runner sets it to its own sys.prefix


@dataclass(frozen=True)
class Run:
    """One run of one notebook: out, where it writes; smoke, whether in small; checkpoint, the network to use."""

    out: Path
    smoke: bool
    checkpoint: Path

    def save_table(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """Write tables/name.csv, .md, .tex (floats to 6 digits in the csv, to 4 in the others); return the table."""
        return self._write_table(table, self.out / "tables" / name)

    def save_timing(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """As `save_table`, into timings/: for wall times, which differ from run to run."""
        return self._write_table(table, self.out / "timings" / name)

    def save_figure(self, figure: plt.Figure, name: str, data: pd.DataFrame, wall_times: bool = False):
        """Write name.pdf, name.png and name.csv (the data behind the figure), into timings/ where it shows wall times;
        close the figure; return the picture, so that the last line of a cell shows it."""
        base = (self.out / "timings" if wall_times else self.out) / name
        base.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("pdf", "png"):
            plots.save(figure, base.with_name(f"{name}.{suffix}"))
        plt.close(figure)
        write_text(base.with_name(f"{name}.csv"), csv_text(data))
        from IPython.display import Image  # only notebooks show pictures
        return Image(data=base.with_name(f"{name}.png").read_bytes(), width=720)

    def save_claims(self, numbers: dict[str, tuple[float, str]]) -> pd.DataFrame:
        """Judge the claims of data/claims.json by numbers {id: (number, detail)}; write claims.json and claims.md (what
        reproduce.sh checks and prints), tables/claims.* and, for the claims about wall times, timings/claims.*."""
        judged = claims.judge_all(claims.read_claims(DATA / "claims.json"), numbers)
        whole = claims_table(judged)
        write_text(self.out / "claims.json", claims.to_json(judged))
        write_text(self.out / "claims.md", markdown_text(whole))
        timed = [j.claim.wall_time for j in judged]
        self.save_timing(whole[timed], "claims")
        apart = whole.copy()
        apart.loc[timed, "this artifact"] = "see timings/claims"
        self.save_table(apart, "claims")
        return whole

    @staticmethod
    def _write_table(table, base):
        for suffix, text in (("csv", csv_text), ("md", markdown_text), ("tex", latex_text)):
            write_text(base.with_name(f"{base.name}.{suffix}"), text(table))
        return table


def open_notebook(mode: str, out: str, checkpoint: str) -> Run:
    """First call of every notebook, with the values of its parameters cell. Folders are relative to the repository, so
    a notebook run by hand in JupyterLab writes to the same place. Raises InputError."""
    expected = os.environ.get(RUNNER_PREFIX)
    if expected is not None and sys.prefix != expected:
        raise InputError(f"kernel: runs in {sys.prefix}; allowed: the runner's environment {expected}")
    if mode not in MODES:
        raise InputError(f"mode: {mode!r}; allowed: {', '.join(MODES)}")
    for name, value in (("out", out), ("checkpoint", checkpoint)):
        if not isinstance(value, str):
            raise InputError(f"{name}: {value!r}; allowed: a path as text")
    folder = (ROOT / out).resolve()
    if not out or folder == FIGURES.resolve() and (mode == "smoke" or checkpoint):
        raise InputError(f"out: {out!r} with mode {mode!r}, checkpoint {checkpoint!r}; allowed: figures for the full "
                         "results of the shipped checkpoint alone, for others a folder of their own (figures/smoke)")
    plots.style()
    return Run(folder, mode == "smoke", ROOT / checkpoint if checkpoint else CHECKPOINT)


def progress(items: Iterable, label: str, total: int | None = None) -> Iterator:
    """Iterate with sparse lines (a quarter of the work each) under the runner, with a bar elsewhere."""
    if RUNNER_PREFIX not in os.environ:
        from tqdm.auto import tqdm  # looks for a notebook when it is imported
        yield from tqdm(items, desc=label, total=total, leave=False)
        return
    total = len(items) if total is None else total
    for done, item in enumerate(items, 1):
        yield item
        if 4 * done // total > 4 * (done - 1) // total:
            print(f"{label}: {done} of {total}", flush=True)


def csv_text(table: pd.DataFrame) -> str:
    return _flat(table).to_csv(index=False, float_format="%.6g", lineterminator="\n")


def markdown_text(table: pd.DataFrame) -> str:
    shown = _shown(table)
    shown.columns = [str(name).replace("|", "\\|") for name in shown.columns]
    shown = shown.map(lambda text: text.replace("|", "\\|"))
    return shown.to_markdown(index=False, disable_numparse=True, colalign=_alignment(table)) + "\n"


def latex_text(table: pd.DataFrame) -> str:
    letters = "".join(side[0] for side in _alignment(table))
    shown = _shown(table)
    shown.columns = [latex_escape(str(name)) for name in shown.columns]
    return shown.map(latex_escape).to_latex(index=False, escape=False, column_format=letters)


def latex_escape(text: str) -> str:
    """Text that LaTeX sets as it stands."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def claims_table(judged: list[claims.Judged]) -> pd.DataFrame:
    """One row a claim, in the order of data/claims.json."""
    rows = []
    for j in judged:
        claim = j.claim
        number = "-" if j.number is None else f"{j.number:.4g} {claim.unit}".strip()
        tolerance = f"{claim.tolerance:g} {claim.unit}: ".replace(" :", ":") if claim.testable else ""
        rows.append({
            "id": claim.id, "statement": f"{claim.statement} ({claim.source})", "measure": claim.measure,
            "bound": claim.bound, "this artifact": f"{number} ({j.detail})" if j.detail else number,
            "tolerance": tolerance + claim.tolerance_reason, "verdict": j.verdict, "notebook": claim.notebook,
            "command": claim.command})
    return pd.DataFrame(rows)


def _flat(table):
    """Named index levels become columns; a plain row number is dropped."""
    return table.reset_index() if any(name is not None for name in table.index.names) else table.reset_index(drop=True)


def _shown(table):
    """Every cell as text."""
    def text(value):
        if isinstance(value, float):
            return "" if pd.isna(value) else f"{value:.4g}"
        return "" if value is None else str(value)

    return _flat(table).astype(object).map(text)


def _alignment(table):
    flat = _flat(table)
    return ["right" if pd.api.types.is_numeric_dtype(dtype) else "left" for dtype in flat.dtypes]
