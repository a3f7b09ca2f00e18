"""The panel of notebook 10: widgets to cluster, plan and picture."""

import pytest

from nnpiper import cluster_file, explorer, planning
from nnpiper.solver import NNPiper


@pytest.fixture
def panel():
    return explorer.Explorer(NNPiper.from_pretrained(), [("rtx3090", 2), ("rtx2080ti", 2)], model="gpt2",
                             micro_batches=8)


def test_the_panel_plans_what_its_widgets_say(panel):
    assert panel.document() == {"devices": [{"device": "rtx3090", "count": 2, "node": "node0"},
                                            {"device": "rtx2080ti", "count": 2, "node": "node1"}],
                                "links": {"between": "10gbe"}}
    panel.inside.value, panel.between.value, panel.model.value = "pcie3", "100gbe", "gpt2-medium"
    panel.devices[2].value, panel.counts[2].value, panel.counts[1].value = "t4", 1, 0
    panel.stages.value, panel.micro_batches.value = 2, 5
    document = explorer.document([("rtx3090", 2), ("rtx2080ti", 0), ("t4", 1)], "pcie3", "100gbe")
    assert panel.document() == document and [e["node"] for e in document["devices"]] == ["node0", "node2"]
    cluster = cluster_file.build(document)
    expected = planning.plan(cluster, planning.Request("gpt2-medium", 5, stages=2), panel.piper)
    assert panel.plan.strategy == expected.strategy and panel.plan.step_s == expected.step_s
    assert cluster.bandwidth_bytes_per_s[0, 2] == pytest.approx(10e9)  # 100 Gb/s, of which 80 % are reached


def test_every_change_draws_anew_within_a_second(panel):
    pictures, seconds = [bytes(panel.picture.value)], []
    for M in (9, 10, 11):  # the least of the three: the machine may be busy with something else
        panel.micro_batches.value = M
        pictures.append(bytes(panel.picture.value))
        seconds.append(panel.seconds)
    assert len(set(pictures)) == 4 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert 0.0 < min(seconds) < 1.0
    assert "11 micro-batches" in panel.text.value and f"step {panel.plan.step_s:.4g} s" in panel.text.value


def test_what_cannot_be_planned_is_said_in_place_of_the_picture(panel):
    panel.stages.value = 5
    assert panel.plan is None and panel.text.value == (
        "stages: 5; allowed: an integer from 1 to 4, with 14 layers and 4 devices")
    assert panel.picture.layout.display == "none"
    panel.stages.value = 4
    assert panel.plan.feasible and panel.picture.layout.display == ""
    panel.model.value = "gpt3-175b"
    assert not panel.plan.feasible and "is short by" in panel.text.value
    for count in panel.counts:
        count.value = 0
    assert panel.plan is None and panel.text.value.startswith("devices: ")


def test_rows_of_the_timeline_name_devices_and_layers(panel):
    panel.stages.value = 2
    axes, = explorer.timeline(panel.plan).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    for label, stage, group in zip(labels, panel.plan.stages, panel.plan.strategy.groups):
        device = stage.devices[0] if len(group) == 1 else ", ".join(f"gpu{k}" for k in group)
        assert label == f"{device}\n{stage.layers}"
