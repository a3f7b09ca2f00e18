"""Explorer: widgets that put a cluster together and draw its plan after every change, for notebook 10.

A node is a machine with devices of one type. Needs ipywidgets, as no other module does.
Symbols: K devices, S stages, M micro-batches.
"""

import html
import io
import time

import ipywidgets as widgets
from matplotlib.figure import Figure

from . import cluster_file, plan_report, planning, plots, simulator
from .cluster import DEVICES, FABRICS, LINKS
from .plan_advice import device_list
from .planning import Plan
from .problem import InputError
from .solver import NNPiper
from .workload import MODELS

NODES, MOST_OF_A_NODE, MOST_MICRO_BATCHES = 3, 4, 32  # more may take longer than a second to plan and draw
AUTO = "auto"
CATALOGUE = "the catalogue's own"
DOTS_PER_INCH = 110


def document(nodes: list[tuple[str, int]], inside: str | None, between: str) -> dict:
    """What a cluster file says of nodes of (device, count), those of no device left out. inside: a link class of
    cluster.LINKS, None: the one that the catalogue joins such devices by."""
    entries = [{"device": device, "count": count, "node": f"node{i}"}
               for i, (device, count) in enumerate(nodes) if count]
    return {"devices": entries, "links": {"between": between} | ({} if inside is None else {"inside": inside})}


def timeline(plan: Plan) -> Figure:
    """The timeline of one step; a row a stage with its devices and layers."""
    names = [stage.devices[0] if len(group) == 1 else device_list([plan.cluster.labels[k] for k in group])
             for stage, group in zip(plan.stages, plan.strategy.groups)]
    labels = [f"{name}\n{stage.layers}" for name, stage in zip(names, plan.stages)]
    return plots.timeline_figure(simulator.timeline(plan.problem, plan.strategy), plan.problem.transfers, labels)


class Explorer(widgets.VBox):
    """A panel of widgets over the timeline that they give. Each change plans anew.

    nodes: at most NODES of (name in cluster.DEVICES, count); the other arguments are the values to begin with
    plan: of the widgets' present values, None where they cannot be planned; seconds: what the last redraw took
    """

    def __init__(self, piper: NNPiper, nodes: list[tuple[str, int]], between: str = "10gbe", model: str = "gpt2-xl",
                 stages: int | None = None, micro_batches: int = 16):
        self.piper, self.plan, self.seconds = piper, None, 0.0
        nodes = [*nodes, *[(next(iter(DEVICES)), 0)] * (NODES - len(nodes))]
        self.devices = [widgets.Dropdown(options=list(DEVICES), value=name, description=f"node {i}")
                        for i, (name, _) in enumerate(nodes)]
        self.counts = [_slider(count, 0, MOST_OF_A_NODE, "devices") for _, count in nodes]
        self.inside = widgets.Dropdown(options=[CATALOGUE, *LINKS], description="in a node")
        self.between = widgets.Dropdown(options=list(FABRICS), value=between, description="between")
        self.model = widgets.Dropdown(options=list(MODELS), value=model, description="model")
        self.stages = widgets.Dropdown(options=[AUTO, *range(1, NODES * MOST_OF_A_NODE + 1)], value=stages or AUTO,
                                       description="stages S")
        self.micro_batches = _slider(micro_batches, 1, MOST_MICRO_BATCHES, "batches M")
        self.picture, self.text = widgets.Image(format="png"), widgets.HTML()
        rows = [*zip(self.devices, self.counts), (self.inside, self.between), (self.model, self.stages),
                (self.micro_batches,)]
        super().__init__([*(widgets.HBox(row) for row in rows), self.text, self.picture])
        for row in rows:
            for widget in row:
                widget.observe(self.redraw, names="value")
        self.redraw()

    def document(self) -> dict:
        """The cluster as `cluster_file.build` takes it."""
        nodes = [(device.value, count.value) for device, count in zip(self.devices, self.counts)]
        return document(nodes, None if self.inside.value == CATALOGUE else self.inside.value, self.between.value)

    def redraw(self, _change=None) -> None:
        """Plan the present values and draw; what cannot be planned is said in place of the picture."""
        begin = time.perf_counter()
        try:
            request = planning.Request(self.model.value, self.micro_batches.value,
                                       None if self.stages.value == AUTO else self.stages.value)
            self.plan = planning.plan(cluster_file.build(self.document()), request, self.piper)
        except InputError as error:
            self.plan, said = None, [str(error)]
        else:
            said = [plan_report.heading(self.plan), *plan_report.lines(self.plan)]
            self.picture.value = _png(timeline(self.plan))
        self.picture.layout.display = "none" if self.plan is None else ""
        self.text.value = "<br>".join(map(html.escape, said))
        self.seconds = time.perf_counter() - begin


def _slider(value, low, high, name):
    # continuous: a plan for every place that the slider passes
    return widgets.IntSlider(value, low, high, description=name, continuous_update=False)


def _png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()
