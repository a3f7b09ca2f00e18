"""Pictures: one style for all figures, saving in the same bytes every time, the timeline of a step, and the few kinds
of chart that the notebooks draw.

Colours are those of Okabe and Ito (2008), which stay apart for colour-blind readers and in grey.
"""

import os
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from .schedule import B, F
from .simulator import Timeline

COLUMN_WIDTH, TEXT_WIDTH = 3.5, 7.16  # inches, IEEE two-column
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#555555"
SKY, RED, PURPLE = "#56B4E9", "#D55E00", "#CC79A7"
# a planner has the same colour, dashes and marker in all figures
LINES = {
    "even": (GREY, ":", "o"), "pipedream": (SKY, "--", "v"), "piper": (SKY, "-.", "^"), "alpa": (PURPLE, "--", "<"),
    "alpa-hetero": (GREEN, "-", "s"), "alpa-hetero sorted": (GREEN, ":", "s"), "amp": (PURPLE, "-", "D"),
    "pipeedge": (ORANGE, "-", "P"), "metis": (RED, "-", "X"), "best dynamic program": ("black", "-", "*"),
    "nnpiper": (BLUE, "-", "o"), "network": (BLUE, "--", "o"), "annealing": (GREY, "-", "d"),
    "local search": ("black", ":", "x"), "subset": ("black", "-", "h")}
OPEN = ("alpa-hetero sorted", "network")  # markers without filling: variants of the planner with the same marker
OP_COLORS, NUMBER_COLORS = {F: BLUE, B: ORANGE}, {F: "white", B: "black"}

OP_HEIGHT, SEND_HEIGHT = 0.62, 0.12  # in rows
NUMBER_POINTS = 5


def style() -> None:
    """Column-width fonts, embedded as TrueType (42), the same ids in every run."""
    mpl.rcParams.update({
        "font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7,
        "xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "legend.fontsize": 6.5, "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.0,
        "figure.figsize": (COLUMN_WIDTH, 2.4), "figure.dpi": 100, "savefig.dpi": 300,
        "figure.constrained_layout.use": True,
        "pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "nnpiper", "text.usetex": False,
    })


def save(figure: Figure, path: Path) -> None:
    """Write a whole picture (pdf, png or svg by the suffix) or nothing; no date inside."""
    kind = path.suffix[1:].lower()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    try:
        figure.savefig(temporary, format=kind, metadata=metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


HATCHED = 1024  # boxes; more are too narrow to show a hatch, and slow to draw with one


def draw_timeline(axes: Axes, timeline: Timeline, transfers: str, labels: list[str] | None = None,
                  span_s: float | None = None) -> None:
    """Gantt chart of one step: a row a stage, F and B with their micro-batch's number where it fits, the transfers each
    stage sends as thin bars under its operations (the gradient's the lower), its all-reduce; white is idle time.

    transfers: the problem's ("blocking", "overlapped"), which says when the all-reduce starts
    labels: [S] names of the rows; span_s: length of the time axis, to draw several steps on one
    """
    S, M = timeline.start_s.shape[1:]
    span_s = timeline.step_s if span_s is None else span_s
    scale, unit = next(((k, u) for k, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if span_s * k >= 1.0), (1e9, "ns"))
    axes.set_xlim(0.0, span_s * scale or 1.0)
    axes.set_ylim(S - 0.38, -0.5)
    for s in range(S):
        for kind in (F, B):
            start, end = timeline.start_s[kind, s] * scale, timeline.end_s[kind, s] * scale
            axes.broken_barh(_bars(start, end), (s - OP_HEIGHT / 2, OP_HEIGHT), facecolor=OP_COLORS[kind],
                             edgecolor="white", linewidth=0.3)
            _number(axes, start, end, s, NUMBER_COLORS[kind])
            arrive, send = timeline.arrive_s[kind, s] * scale, timeline.send_s[kind, s] * scale
            if send > 0:
                top = s + OP_HEIGHT / 2 + (0.02 if kind == F else 0.02 + SEND_HEIGHT)
                hatch = "////" if S * M <= HATCHED else None
                axes.broken_barh(_bars(arrive - send, arrive), (top, SEND_HEIGHT), facecolor=OP_COLORS[kind],
                                 edgecolor=GREY, linewidth=0.3, hatch=hatch)
        if timeline.all_reduce_s[s] > 0:
            last = timeline.arrive_s if transfers == "blocking" else timeline.end_s
            axes.broken_barh([(last[:, s].max() * scale, timeline.all_reduce_s[s] * scale)],
                             (s - OP_HEIGHT / 2, OP_HEIGHT), facecolor=GREEN)
    axes.set_yticks(range(S), labels if labels is not None else [f"stage {s}" for s in range(S)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time [{unit}]")


def timeline_legend() -> list[Patch]:
    """Handles of what `draw_timeline` draws, for a legend shared by several charts."""
    return [Patch(facecolor=BLUE, label="forward"), Patch(facecolor=ORANGE, label="backward"),
            Patch(facecolor="white", edgecolor=GREY, hatch="//////", label="transfer"),
            Patch(facecolor=GREEN, label="all-reduce")]


def timeline_figure(timeline: Timeline, transfers: str, labels: list[str]) -> Figure:
    """A figure of its own for one step: text width, as tall as its rows need."""
    style()
    figure = Figure(figsize=(TEXT_WIDTH, 0.9 + 0.32 * len(labels)), layout="constrained")
    axes = figure.subplots()
    draw_timeline(axes, timeline, transfers, labels)
    axes.set_title(f"one training iteration (step): {timeline.step_s:.4g} s", loc="left")
    figure.legend(handles=timeline_legend(), loc="outside lower center", ncols=4)
    return figure


def points(name: str) -> dict:
    """Arguments of `Axes.plot` for a planner's markers."""
    color, _, marker = LINES[name]
    return {"color": color, "marker": marker, "markersize": 3.5, "linestyle": "none", "label": name,
            "markerfacecolor": "white" if name in OPEN else color, "markeredgewidth": 0.8}


def line(name: str) -> dict:
    """Arguments of `Axes.plot` for a planner's line with markers."""
    return points(name) | {"linestyle": LINES[name][1]}


def draw_ecdf(axes: Axes, ratios: dict[str, np.ndarray]) -> None:
    """Share of problems up to each ratio of steps, a line a planner; NaN (no plan) stays above every ratio."""
    for name, values in ratios.items():
        color, dashes, _ = LINES[name]
        there = np.sort(values[np.isfinite(values)])
        axes.step(np.concatenate([[there[0]] if len(there) else [], there]),
                  np.arange(len(there) + min(len(there), 1)) / max(len(values), 1), where="post", color=color,
                  linestyle=dashes, label=name)
    axes.axvline(1.0, color="black", linewidth=0.5)
    log_axis(axes.xaxis)
    axes.set_ylim(0.0, 1.0)


def draw_intervals(axes: Axes, means: dict[str, np.ndarray], lows: dict[str, np.ndarray], highs: dict[str, np.ndarray],
                   groups: list[str]) -> None:
    """Means with intervals: a row a group, within it a marker for each name; x a ratio of steps, logarithmic."""
    height = 0.8 / len(means)
    for i, name in enumerate(means):
        y = np.arange(len(groups)) + (i - (len(means) - 1) / 2) * height
        axes.hlines(y, lows[name], highs[name], color=LINES[name][0], linewidth=0.8)
        axes.plot(means[name], y, **points(name))
    for edge in range(1, len(groups)):
        axes.axhline(edge - 0.5, color="#DDDDDD", linewidth=0.5, zorder=0)
    axes.axvline(1.0, color="black", linewidth=0.5)
    _rows(axes, groups)
    log_axis(axes.xaxis)


def draw_gaps(axes: Axes, gaps: list[tuple[dict, np.ndarray, np.ndarray, np.ndarray]], names: list[str]) -> None:
    """Gaps in % with intervals, a row a name: for each series (arguments of `Axes.plot`, means, lows, highs)."""
    for i, (look, mean, low, high) in enumerate(gaps):
        y = np.arange(len(names)) + (i - (len(gaps) - 1) / 2) * 0.66 / len(gaps)
        axes.hlines(y, low, high, color=look["color"], linewidth=0.8)
        axes.plot(mean, y, **look)
    _rows(axes, names)
    ends = np.concatenate([values for _, *series in gaps for values in series])
    gap_axis(axes, "x", ends)
    axes.axvline(0.0, color="black", linewidth=0.5)
    axes.set_xlabel("gap to long annealing [%]")


def gap_axis(axes: Axes, which: str, values: np.ndarray) -> None:
    """Make the axis "x" or "y" one of gaps in %, linear up to 1 and logarithmic beyond, wide enough for `values`."""
    low, high = min(1.3 * np.nanmin(values), -0.5), max(1.3 * np.nanmax(values), 1.5)
    ticks = [tick for tick in (-100, -30, -10, -3, -1, 0, 1, 3, 10, 30, 100, 1000) if low <= tick <= high]
    getattr(axes, f"set_{which}scale")("symlog", linthresh=1.0)
    getattr(axes, f"set_{which}ticks")(ticks, [str(tick) for tick in ticks])
    getattr(axes, f"set_{which}lim")(low, high)
    getattr(axes, f"{which}axis").set_minor_locator(NullLocator())


def _rows(axes, names):
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def log_axis(axis: Axis) -> None:
    """Logarithmic, with plain numbers at 1, 2, 5 of each decade."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_heat(axes: Axes, values: np.ndarray, text: str, title: str) -> None:
    """A matrix as colours with its numbers inside, `text` their format; NaN is left white."""
    axes.imshow(values, cmap="cividis", aspect="auto")
    low, high = np.nanmin(values), np.nanmax(values)
    for row, column in np.argwhere(np.isfinite(values)):
        value = values[row, column]
        dark = value < low + 0.5 * (high - low)
        axes.text(column, row, text.format(value), ha="center", va="center", fontsize=NUMBER_POINTS,
                  color="white" if dark else "black")
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(values.shape[0]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left")


def _bars(start, end):
    return np.stack([start, end - start], axis=1)


def _number(axes, start, end, row, color):
    """Write 0 .. M - 1 into the bars, if the widest number fits into the bars of this row."""
    points = axes.get_position().width * axes.figure.get_figwidth() * 72.0
    width = (end - start).max() / np.diff(axes.get_xlim())[0] * points
    if width < 0.7 * NUMBER_POINTS * len(str(len(start) - 1)) + 1.0:
        return
    for m, middle in enumerate((start + end) / 2):
        axes.text(middle, row, str(m), ha="center", va="center_baseline", fontsize=NUMBER_POINTS, color=color)
