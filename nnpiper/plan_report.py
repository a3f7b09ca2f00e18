"""Plan report: a plan as tables for a terminal or a file, and as one HTML page with its timeline and memory picture.

Names come from users: what cannot be printed is shown as "?", and the page escapes them.
"""

import html
import io
import warnings

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from . import plots, simulator
from .plan_advice import count
from .planning import Plan
from .problem import Problem

PIPED_WIDTH = 10_000  # columns: no line of a file is broken or cut
DRAWN_OPS = 1 << 13  # S x M that a picture shows; more micro-batches are left out
LABEL = 28  # characters of a row's label in the picture; the table has all of them
WIDTH = 10.0  # inches


def printable(text: str) -> str:
    """The text with "?" for what a terminal or a page could not show, or would take for a command."""
    return "".join(c if c.isprintable() else "?" for c in text)


def console(file=None) -> Console:
    """For tables: as wide as the terminal, or as wide as it takes where the output is redirected."""
    out = Console(file=file, highlight=False, markup=False, emoji=False)
    return out if out.is_terminal else Console(file=file, highlight=False, markup=False, emoji=False,
                                               width=PIPED_WIDTH)


def print_table(header: list[str], rows: list[list[str]], words: int, file=None) -> None:
    """A table whose first `words` columns are text; cells are broken into lines where the terminal is narrow."""
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, overflow="fold", justify="left" if i < words else "right")
    for row in rows:
        table.add_row(*map(printable, row))
    console(file).print(table)


def print_plan(plan: Plan, file=None) -> None:
    """Heading, table of the stages, and what is to be known of the plan, a line each."""
    out = console(file)
    out.print(printable(heading(plan)), soft_wrap=True)
    print_table(HEADER, stage_rows(plan), 3, file)
    for line in lines(plan):
        out.print(printable(line), soft_wrap=True)


HEADER = ["stage", "layers", "devices", "forward + backward [ms]", "transfers [ms]", "used / usable memory [GB]",
          "idle [%]"]


def heading(plan: Plan) -> str:
    """What was planned."""
    r, p = plan.request, plan.problem
    tokens = "" if r.tokens is None else f" x {r.tokens} tokens"
    return (f"{plan.workload.name} on {count(p.devices, 'device')}: {count(p.stages, 'stage')}, "
            f"{count(p.micro_batches, 'micro-batch')} of {r.micro_batch_size}{tokens}, {p.schedule}, "
            f"{p.transfers} transfers{', recomputation' if r.recompute else ''}")


def stage_rows(plan: Plan) -> list[list[str]]:
    """A row a stage under HEADER; times of one micro-batch, memory of the device with the least room."""
    rows = []
    for s, stage in enumerate(plan.stages):
        compute_s = stage.forward_s + stage.backward_s
        memory = f"{_gigabytes(stage.used_bytes)} / {_gigabytes(stage.available_bytes)}"
        rows.append([str(s), stage.layers, ", ".join(stage.devices), f"{1e3 * compute_s:.4g}",
                     f"{1e3 * stage.send_s:.3g}", memory, f"{100 * stage.idle_share:.1f}"])
    return rows


def lines(plan: Plan) -> list[str]:
    """What is to be known beside the table, a sentence a line."""
    stages = count(plan.problem.stages, "stage")
    rates = "".join(f", {_rate(rate)} {name}/s" for rate, name in
                    ((plan.samples_per_s, "samples"), (plan.tokens_per_s, "tokens")) if rate is not None)
    out = [f"step {plan.step_s:.4g} s{rates}, bubble {plan.bubble:.1%}, one micro-batch alone {plan.latency_s:.4g} s"]
    if plan.feasible:
        out.append(f"bottleneck: {plan.bottleneck}")
        if plan.speedup is None:
            out.append(f"an even split over {stages} (equal layer counts, devices in file order) does not fit into memory")
        else:
            out.append(f"{plan.speedup:.2f} times as fast as an even split over {stages} (equal layer counts, devices in "
                       f"file order), {plan.even_s:.4g} s")
        if plan.bound_s:
            wishes = ", whatever devices it may use" if plan.request.pins or plan.request.max_devices else ""
            out.append(f"no plan of {stages} under {plan.problem.schedule}{wishes} takes less than {plan.bound_s:.4g} s: "
                       f"this one is at most {max(plan.objective_s / plan.bound_s - 1, 0.0):.1%} slower than the best")
        why = "as asked" if plan.request.max_devices or plan.request.pins else "no plan found was faster with it"
        out += [f"unused: {device}; {why}" for device in plan.unused[:UNUSED]]
        if len(plan.unused) > UNUSED:
            out.append(f"unused: {len(plan.unused) - UNUSED} further devices")
    else:
        out += ["DOES NOT FIT; of the nearest plan:", *plan.shortage_lines]
    return out + [f"advice: {line}" for line in plan.advice]


UNUSED = 8  # devices that get a line of their own


def page(plan: Plan) -> str:
    """One HTML page that needs nothing beside it: heading, table, lines, timeline and memory picture."""
    title = html.escape(printable(heading(plan)))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADER)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(printable(cell))}</td>" for cell in row) + "</tr>"
                     for row in stage_rows(plan))
    items = "\n".join(f"<li>{html.escape(printable(line))}</li>" for line in lines(plan))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.3rem 0.7rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }}
td:nth-child(n+4) {{ text-align: right; white-space: nowrap; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<ul>
{items}
</ul>
{svg(figure(plan))}
</body>
</html>
"""


def figure(plan: Plan) -> Figure:
    """The timeline of one step above, the memory of every stage's fullest device below."""
    plots.style()
    problem, names = _drawn(plan.problem), [_label(plan, s) for s in range(plan.problem.stages)]
    S, left_out = problem.stages, plan.problem.micro_batches - problem.micro_batches
    rows = 0.9 + 0.32 * S
    with mpl.rc_context({"text.parse_math": False}):
        result = Figure(figsize=(WIDTH, 2 * rows), layout="constrained")
        above, below = result.subplots(2)
        timeline = simulator.timeline(problem, plan.strategy)
        plots.draw_timeline(above, timeline, problem.transfers, names)
        above.set_title(f"one step: {plan.step_s:.4g} s" + (
            f"; drawn without {left_out} of its {plan.problem.micro_batches} micro-batches" if left_out else ""),
            loc="left")
        used, usable = (np.array([getattr(stage, name) for stage in plan.stages]) / 1e9
                        for name in ("used_bytes", "available_bytes"))
        color = np.where(used > usable, plots.RED, plots.SKY)
        below.barh(range(S), usable, color="white", edgecolor=plots.GREY, linewidth=0.8, height=0.62)
        below.barh(range(S), used, color=color, height=0.4)
        below.set_yticks(range(S), names)
        below.set_ylim(S - 0.5, -0.5)
        below.tick_params(axis="y", length=0)
        below.set_xlabel("memory [GB], used (filled) and usable (outline) of the device with the least room")
        result.legend(handles=plots.timeline_legend(), loc="outside lower center", ncols=4)
    return result


def svg(drawn: Figure) -> str:
    """The picture as an <svg> element; its text stays text, which the reader's own fonts show."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nnpiper"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names in any script
        drawn.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg"):]


def _drawn(problem: Problem) -> Problem:
    """The problem with no more micro-batches than a picture can show."""
    return problem.replace(micro_batches=min(problem.micro_batches, max(DRAWN_OPS // problem.stages, 1)))


def _label(plan, s):
    text = f"{s}: {printable(', '.join(plan.cluster.labels[k] for k in plan.strategy.groups[s]))}"
    return text if len(text) <= LABEL else text[:LABEL - 3] + "..."


def _rate(per_s):
    return f"{per_s:,.0f}" if per_s >= 1e4 else f"{per_s:.4g}"


def _gigabytes(n):
    return f"{n / 1e9:.1f}" if n >= 1e8 else f"{n / 1e9:.3g}"
