"""Statistics over the rows of `experiments`: gains over each planner with confidence intervals, gaps to a reference.

The *gain* over a planner on one problem is step(planner) / step(NNPiper) - 1, in %: by so much more work is done in the
same time, which is how "improves the training speed by x %" is read. A planner whose plan does not fit in memory has
no gain on that problem and is counted under `no_plan`; means are over the problems where it has one. An interval is a
percentile bootstrap over problems, 95 %, from an explicit seed; where problems come in groups (models, sizes) each
group has the same weight and is resampled within itself.
"""

import numpy as np
import pandas as pd

from .experiments import DYNAMIC_PROGRAMS

CASE = ["model", "environment", "devices", "stages", "number"]
BEST_PROGRAM = "best dynamic program"
RESAMPLES, COVERAGE = 10_000, 0.95
SUMMARY = ["problems", "no_plan", "mean", "low", "high", "median", "geometric_mean"]


def usable_steps(rows: pd.DataFrame, column: str = "planner", keys: list[str] | None = None) -> pd.DataFrame:
    """Step times in s with a row for each problem and a column for each value of `column`; NaN where the plan does not
    fit in memory or there is none."""
    keys = [*CASE, *(name for name in ("transfers",) if name in rows)] if keys is None else keys
    fitting = rows.assign(step_s=rows["step_s"].where(rows["feasible"]))
    wide = fitting.pivot(index=keys, columns=column, values="step_s")  # sorted: put back into the order of the rows
    return wide.reindex(index=pd.MultiIndex.from_frame(rows[keys].drop_duplicates()), columns=rows[column].unique())


def gains(rows: pd.DataFrame, over: str = "nnpiper") -> pd.DataFrame:
    """% gain of `over` over every other planner and over the best dynamic program of each problem; a row a problem."""
    steps = usable_steps(rows)
    programs = [name for name in DYNAMIC_PROGRAMS if name in steps]
    if programs:
        steps[BEST_PROGRAM] = steps[programs].min(axis=1)
    return _percent(steps, over)


def mean_interval(groups: list[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the groups' means and its bootstrap interval (low, high); groups without values are left out, and with
    none left everything is NaN."""
    groups = [values for values in map(_finite, groups) if len(values)]
    if not groups:
        return np.nan, np.nan, np.nan
    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for values in groups:
        means += values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1) / len(groups)
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(np.mean([values.mean() for values in groups])), float(low), float(high)


def summarise(table: pd.DataFrame, by: list[str], strata: tuple[str, ...] = ("model", "stages")) -> pd.DataFrame:
    """Long table: for every group of `by` and every column of a `gains` table the columns SUMMARY. `strata` are the
    index levels of equal weight within a group (those in `by` are constant there). `mean`, `low` and `high` weight
    strata equally; median and geometric mean (of the ratios) pool all problems."""
    records = []
    for key, part in table.groupby(level=by, sort=False):
        for planner in table.columns:
            groups = [values.to_numpy() for _, values in part[planner].groupby(level=list(strata), sort=False)]
            pooled = np.concatenate(groups)
            there = _finite(pooled)
            mean, low, high = mean_interval(groups)
            ratio = np.log1p(there / 100.0)
            records.append(dict(zip(by, key)) | {"planner": planner} | dict(zip(SUMMARY, (
                len(pooled), len(pooled) - len(there), mean, low, high,
                float(np.median(there)) if len(there) else np.nan,
                float(100.0 * np.expm1(ratio.mean())) if len(there) else np.nan))))
    return pd.DataFrame(records)


def gap_table(rows: pd.DataFrame, keys: list[str], reference: str, column: str = "planner") -> pd.DataFrame:
    """% over the reference's step of every other value of `column`, a row a problem; problems whose reference has no
    plan within memory are left out."""
    steps = usable_steps(rows, column, keys)
    steps = steps[steps[reference].notna()]
    return _percent(steps, reference)


def text_interval(mean: float, low: float, high: float) -> str:
    """18.0 [16.9, 19.2], or - where there is no number."""
    if not np.isfinite(mean):
        return "-"
    digits = 0 if abs(mean) >= 100 else 1 if abs(mean) >= 10 else 2
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _percent(steps, over):
    """Rounded, so that equal steps give 0 and not the last bit of a sum."""
    return (100.0 * (steps.div(steps[over], axis=0) - 1.0)).drop(columns=over).round(9) + 0.0


def _finite(values):
    values = np.asarray(values, dtype=np.float64)
    return values[np.isfinite(values)]
