"""Exports: every text parses back to the plan by its format's own grammar, and what a format cannot hold is refused.

Symbols: L layers, K devices, S stages, R replicas of a stage, M micro-batches.
"""

import doctest
import json
import os
import re
import subprocess

import pytest
from export_parsers import PARSERS, megatron_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from nnpiper import export
from nnpiper.exporters import training
from nnpiper.plan_file import PlanFile
from nnpiper.problem import InputError

FAMILIES = {"gpt2-xl": "gpt", "llama3-8b": "llama", "bert-large": "bert", "t5-large": "t5", "my model\n'; rm": None}
TRAINING = ("megatron", "deepspeed", "torch", "torchtitan")


def kinds_of(model, blocks):
    if FAMILIES[model] == "t5":
        return ["embedding", *["encoder"] * blocks, "embedding", *["decoder"] * blocks, "head"]
    return ["embedding", *["block"] * blocks, "head"]


def make(counts, model="llama3-8b", devices=None, groups=None, **fields):
    """A plan with these layer counts, embedding and head included, on devices of (node, index, title)."""
    S = len(counts)
    devices = [("alpha", k, "RTX 3090") for k in range(S)] if devices is None else devices
    kinds = kinds_of(model, (sum(counts) - 3) // 2 if FAMILIES[model] == "t5" else sum(counts) - 2)
    assert len(kinds) == sum(counts)
    defaults = dict(micro_batches=8, micro_batch_size=1, sequence_length=1024, schedule="1f1b", transfers="blocking",
                    recompute=False, step_s=0.5)
    return PlanFile(
        model=model, layer_kinds=kinds, cuts=[sum(counts[:s]) for s in range(1, S)],
        devices=[dict(name=f"gpu{k}", title=title, node=node, index=index)
                 for k, (node, index, title) in enumerate(devices)],
        groups=[[k] for k in range(S)] if groups is None else groups, **{**defaults, **fields})


@st.composite
def plans(draw):
    """Plans of all families, sizes, groupings and placements."""
    model = draw(st.sampled_from(list(FAMILIES)))
    blocks = draw(st.integers(1, 60))
    L = len(kinds_of(model, blocks))
    S = draw(st.integers(1, min(L, draw(st.sampled_from([2, 4, 8, 20])))))
    cuts = sorted(draw(st.permutations(range(1, L)))[:S - 1])
    R = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    sizes = [R] * S
    if draw(st.integers(0, 5)) == 0:
        sizes[draw(st.integers(0, S - 1))] += 1
    used = sum(sizes)
    K = used + draw(st.integers(0, 2))
    nodes = draw(st.permutations(["alpha", "10.0.0.2", "b-1.example.org"]))[:draw(st.integers(1, 3))]
    if draw(st.integers(0, 9)) == 0:
        nodes[-1] = "lab 3"
    arrangement = draw(st.sampled_from(["one", "blocks", "blocks", "round robin", "any"]))
    node_of = {"one": lambda k: 0, "blocks": lambda k: min(k * len(nodes) // used, len(nodes) - 1),
               "round robin": lambda k: k % len(nodes),
               "any": lambda k: draw(st.integers(0, len(nodes) - 1))}[arrangement]
    places = [node_of(k) for k in range(K)]
    free = [draw(st.permutations(range(K))) for _ in nodes]
    index = [free[node].pop() for node in places]
    if draw(st.integers(0, 19)) == 0:
        index[-1] = index[0]
    titles = ["RTX 3090", *(["A100"] if draw(st.integers(0, 2)) == 0 else [])]
    devices = [(nodes[places[k]], index[k], draw(st.sampled_from(titles))) for k in range(K)]
    order = draw(st.permutations(range(K))) if arrangement == "any" else list(range(K))
    groups = [sorted(order[sum(sizes[:s]):sum(sizes[:s + 1])]) for s in range(S)]
    counts = [right - left for left, right in zip([0, *cuts], [*cuts, L])]
    return make(counts, model, devices, groups,
                micro_batches=draw(st.integers(1, 24)), micro_batch_size=draw(st.sampled_from([1, 2, 4, 6, 12])),
                sequence_length=draw(st.sampled_from([128, 1024])), schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
                transfers=draw(st.sampled_from(["blocking", "overlapped"])), recompute=draw(st.booleans()))


@st.composite
def plain_plans(draw):
    """Plans that all formats hold but accelerate: one device a stage, as many neighbouring stages on every node."""
    nodes, share = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    S = nodes * share
    counts = draw(st.lists(st.integers(1, 9), min_size=S, max_size=S))
    counts[0] += 1
    counts[-1] += 1
    indices = [draw(st.permutations(range(8)))[:share] for _ in range(nodes)]
    devices = [(f"node{i}", index, draw(st.sampled_from(["A100", "V100"])))
               for i in range(nodes) for index in indices[i]]
    order = draw(st.permutations(range(S)))  # device numbers say nothing of the stage
    model = draw(st.sampled_from(["llama3-8b", "my model\n'; rm"]))
    return make(counts, model, [devices[order.index(k)] for k in range(S)], [[k] for k in order],
                micro_batches=draw(st.integers(S, 40)), recompute=draw(st.booleans()))


def stages_of(plan):
    """[S][R] of (node, index), and [S] the kinds."""
    bounds = [0, *plan.cuts, len(plan.layer_kinds)]
    places = [[(plan.devices[k].node, plan.devices[k].index) for k in group] for group in plan.groups]
    return places, [plan.layer_kinds[a:b] for a, b in zip(bounds, bounds[1:])]


def reasons(plan, target):
    """Words of every reason that there is against this export, by the format's rules; empty: it must succeed."""
    places, kinds = stages_of(plan)
    family, S, found = FAMILIES[plan.model], len(places), []
    if target == "json":
        return found
    flat = [place for group in places for place in group]
    nodes = [node for node, _ in flat]
    runs = [nodes[0]] + [b for a, b in zip(nodes, nodes[1:]) if a != b]
    found += ["both are index"] * (len(set(flat)) < len(flat))
    found += ["are written as addresses"] * (len(set(nodes)) > 1 and "lab 3" in nodes and target != "accelerate")
    if target not in ("deepspeed", "accelerate"):
        found += ["not an encoder and a decoder"] * (family == "t5")
    if target in TRAINING:
        sizes = {len(group) for group in plan.groups}
        found += ["one for the whole pipeline"] * (len(sizes) > 1)
        found += ["equal shares"] * any(len({plan.devices[k].title for k in group}) > 1 for group in plan.groups)
        found += ["whole number of sequences"] * (plan.micro_batch_size % len(plan.groups[0]) > 0)
        found += ["1f1b alone"] * (target in ("megatron", "deepspeed") and plan.schedule == "gpipe")
        found += ["as many micro-batches as stages"] * (
            target in ("torch", "torchtitan") and plan.schedule == "1f1b" and plan.micro_batches < S)
        found += ["is deleted"] * (target == "torchtitan" and family in ("gpt", "bert"))
        return found
    found += ["no replicas"] * any(len(group) > 1 for group in plan.groups)
    if target == "accelerate":
        embeddings = [s for s, stage in enumerate(kinds) for kind in stage if kind == "embedding"]
        return found + ["one process on one node"] * (len(set(nodes)) > 1) + ["are not known"] * (family is None) + [
            "they are one module"] * (family == "t5" and len(set(embeddings)) > 1)
    if target == "llama.cpp":
        found += ["limited number of devices"] * (S > 16)
        return found + ["empty stage"] * any(set(stage) == {"embedding"} for stage in kinds)
    found += ["empty stage"] * any("block" not in stage for stage in kinds)
    found += ["has no pipeline parallelism"] * (
        S > 1 and family in {"vllm": ("bert",), "sglang": ("gpt", "bert")}[target])
    found += ["node by node"] * (len(runs) > len(set(runs)))
    found += ["runs as many ranks"] * (len({nodes.count(node) for node in nodes}) > 1)
    return found


def check_round_trip(plan, target):
    places, kinds = stages_of(plan)
    family = FAMILIES[plan.model]
    blocks = plan.layer_kinds.count("encoder" if family == "t5" else "block")
    text = export.export(plan, target)
    assert text.endswith("\n") and not text.endswith("\n\n")
    parsed = PARSERS[target](text, family, blocks)
    assert parsed.blocks == [sum(kind in ("block", "encoder", "decoder") for kind in stage) for stage in kinds]
    assert parsed.layers is None or parsed.layers == plan.layer_counts
    if target == "accelerate":  # one node, whose name it does not need
        places = [[(None, index) for _, index in group] for group in places]
    assert parsed.devices == places
    for name, value in parsed.settings.items():
        assert value == getattr(plan, name), name


@pytest.mark.parametrize("target", export.TARGETS)
@settings(max_examples=150)
@given(plan=plans())
def test_an_export_parses_back_to_the_plan_or_is_refused_for_its_reason(target, plan):
    expected = reasons(plan, target)
    if not expected:
        check_round_trip(plan, target)
        return
    with pytest.raises(InputError) as error:
        export.export(plan, target)
    message = str(error.value)
    assert message.startswith(f"{target}: ") and "; allowed: " in message and "\n" not in message
    assert any(reason in message for reason in expected), (message, expected)


@pytest.mark.parametrize("target", [target for target in export.TARGETS if target != "accelerate"])
@settings(max_examples=100)
@given(plan=plain_plans())
def test_a_plain_plan_round_trips_everywhere(target, plan):
    assert reasons(plan, target) == []
    check_round_trip(plan, target)


@pytest.mark.parametrize("target", export.TARGETS)
def test_each_format_holds_an_uneven_plan_on_two_nodes_or_says_why_not(target):
    plan = make([8, 10, 9, 7], devices=[("alpha", 1, "A100"), ("alpha", 0, "A100"), ("beta", 2, "V100"),
                                        ("beta", 0, "V100")], recompute=True)
    if target == "accelerate":
        with pytest.raises(InputError, match="accelerate: nodes 'alpha', 'beta': .*; allowed: devices of one node"):
            export.export(plan, target)
    else:
        assert reasons(plan, target) == []
        check_round_trip(plan, target)


@pytest.mark.parametrize("target", [*TRAINING, "llama.cpp", "json"])
def test_stages_that_alternate_between_nodes_keep_their_order(target):
    devices = [("alpha", 1, "A100"), ("beta", 0, "V100"), ("alpha", 0, "A100"), ("beta", 1, "V100"),
               ("alpha", 2, "A100")]
    check_round_trip(make([3, 6, 2, 8, 4], devices=devices), target)


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_servers_that_number_ranks_node_by_node_refuse_alternating_nodes(target):
    devices = [("alpha", 1, "A100"), ("beta", 0, "V100"), ("alpha", 0, "A100")]
    with pytest.raises(InputError, match=f"{target}: stages on nodes alpha, beta, alpha: .*neighbouring stages"):
        export.export(make([4, 4, 4], devices=devices), target)


@pytest.mark.parametrize("target", TRAINING)
def test_replicas_are_kept_where_they_are_equal(target):
    devices = [(node, index, title) for node, title in (("alpha", "V100"), ("beta", "A100")) for index in (1, 0)]
    plan = make([9, 7], devices=devices, groups=[[0, 1], [2, 3]], micro_batch_size=4)
    check_round_trip(plan, target)
    for change, reason in (
            (dict(groups=[[0, 1], [2]]), "stages of 2, 1 devices"), (dict(groups=[[0, 2], [1, 3]]), "A100 and V100"),
            (dict(micro_batch_size=3), "micro_batch_size 3 on 2 replicas")):
        with pytest.raises(InputError, match=f"{target}: .*{reason}.*; allowed: "):
            export.export(plan.model_copy(update=change), target)


def test_vllm_21061_the_device_order_is_part_of_the_plan():
    order = [7, 6, 5, 4, 0, 1, 2, 3]
    plan = make([5, 4, 4, 4, 4, 4, 4, 5], devices=[("box", index, "A") for index in order])
    for target in ("vllm", "sglang", "llama.cpp", "accelerate", *TRAINING):
        text = export.export(plan, target)
        assert re.search(r'CUDA_VISIBLE_DEVICES"?\]?( = ")?=?7,6,5,4,0,1,2,3', text), target
        check_round_trip(plan, target)


def test_vllm_34076_48_layers_as_16_and_32():
    text = export.export(make([17, 33], model="gpt2-xl"), "vllm")
    assert 'VLLM_PP_LAYER_PARTITION="16,32" vllm serve' in text and "--pipeline-parallel-size 2" in text


def test_vllm_27778_replicas_of_a_stage_are_refused():
    plan = make([17, 17], devices=[("box", k, "V100") for k in range(3)], groups=[[0, 1], [2]])
    for target in ("vllm", "sglang", "llama.cpp", "accelerate"):
        with pytest.raises(InputError, match=f"^{re.escape(target)}: stage 0 has 2 devices: .*one device on every"):
            export.export(plan, target)


@pytest.mark.parametrize("counts", [[9, 8, 8, 7], [8, 7, 8, 9]])
def test_megatron_1304_30_layers_on_4_keep_all_30(counts):
    text = export.export(make(counts), "megatron")
    layout = re.search(r'layout "(.*)"', text)[1]
    assert sum(stage.count("t") for (stage,) in megatron_layout(layout, 4)) == 30
    for target in set(export.TARGETS):
        check_round_trip(make(counts), target)


def test_deepspeed_4312_5_layers_on_4_leave_no_stage_empty():
    plan = make([2, 1, 1, 1])
    text = export.export(plan, "deepspeed")
    assert "PARTS = [0, 2, 3, 4, 5]" in text
    check_round_trip(plan, "megatron")  # "Et|t|t|L": Megatron counts the head
    with pytest.raises(InputError, match="vllm: stage 3 would be an empty stage: .*not embedding and head"):
        export.export(plan, "vllm")
    with pytest.raises(InputError, match="strategy: cuts"):
        export.export(plan.model_copy(update={"cuts": [2, 3, 3]}), "deepspeed")


@pytest.mark.parametrize("cuts", [[4, 12], [4, 12, 40], [12, 4, 8], [0, 4, 8]])
def test_megatron_1778_a_split_that_is_not_one_is_rejected(cuts):
    plan = make([4, 8, 8, 8]).model_copy(update={"cuts": cuts})
    for target in export.TARGETS:
        with pytest.raises(InputError, match="strategy: "):
            export.export(plan, target)


def test_a_stage_of_embedding_or_head_alone():
    plan = make([1, 8, 8, 1])
    assert '"E|t*8|t*8|L"' in export.export(plan, "megatron")
    for target in ("megatron", "deepspeed", "torch", "torchtitan", "accelerate", "json"):
        check_round_trip(plan, target)
    check_round_trip(make([9, 8, 1]), "llama.cpp")  # its last position is the output layer
    for target in ("vllm", "sglang", "llama.cpp"):
        with pytest.raises(InputError, match=f"^{re.escape(target)}: stage 0 would be an empty stage"):
            export.export(plan, target)


@pytest.mark.parametrize("P, counts", [(4, [7, 8, 9, 8]), (4, [3, 4, 4, 4, 5, 4, 4, 4]), (2, [1, 1, 2, 30])])
def test_primus_69_layouts_with_virtual_stages_round_trip(P, counts):
    stages = [["block"] * n for n in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("head")
    by_rank = megatron_layout(training.layout(stages), P)
    assert [[virtual.count("t") for virtual in rank] for rank in by_rank] == [counts[rank::P] for rank in range(P)]


def test_the_layout_parser_knows_the_documented_grammar():
    assert [len(rank) for rank in megatron_layout("Et*3|(tt|)*29,m|L", 16)] == [2] * 16
    assert [stage.count("t") for (stage,) in megatron_layout("Ett|ttt|tttt|ttL", 4)] == [2, 3, 4, 2]
    for wrong in ("tt|tL", "Ett|t", "EttL|t", "EtEL", "Em|tL", "Ext|L", "E(t|(t|)*2)*2L"):
        with pytest.raises(AssertionError):
            megatron_layout(wrong, 1)


def test_layers_beyond_999_stay_on_the_gpus_of_llama_cpp():
    check_round_trip(make([700, 800]), "llama.cpp")


def test_t5_is_for_deepspeed_alone_unless_its_embeddings_share_a_stage():
    plan = make([12, 13, 26], model="t5-large")
    check_round_trip(plan, "deepspeed")
    with pytest.raises(InputError, match="accelerate: the embeddings of encoder and decoder on stages 0 and 2"):
        export.export(plan, "accelerate")
    check_round_trip(make([26, 25], model="t5-large"), "accelerate")
    for target in ("megatron", "torch", "torchtitan", "vllm", "sglang", "llama.cpp"):
        with pytest.raises(InputError, match=f"^{re.escape(target)}: layer 1 is of kind 'encoder'"):
            export.export(plan, target)


@pytest.mark.parametrize("kinds", [["block"], ["head", "block", "embedding"], ["block"] * 5,
                                   ["embedding", "block", "embedding", "block", "head"], ["embedding", "head"]])
def test_odd_models_end_in_a_text_or_one_clear_error(kinds):
    for model in FAMILIES:
        plan = make([3]).model_copy(update={"layer_kinds": kinds, "model": model})
        for target in export.TARGETS:
            try:
                assert export.export(plan, target).endswith("\n")
            except InputError as error:
                assert str(error).startswith(f"{target}: ") and "; allowed: " in str(error)


def test_an_unknown_target_is_refused():
    with pytest.raises(InputError, match="target: 'pytorch'; allowed: megatron, deepspeed, torch, torchtitan, vllm"):
        export.export(make([3]), "pytorch")


NASTY = ["x\nimport os", "'\"$(touch pwned)`touch pwned`", '"""', "a\rb", "\u2028\x85\x1b[31m", "Ω {braces} \\n"]


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("target", export.TARGETS)
def test_names_never_leave_the_comments(name, target, tmp_path):
    """With any name for model, device and node, only comments differ, and the shell runs the same words."""
    def named(text):
        plan = make([5, 6], model="llama3-8b", devices=[("box", 1, text), ("box", 0, text)])
        devices = [device.model_copy(update={"name": f"{text}{k}", "node": text})
                   for k, device in enumerate(plan.devices)]
        return export.export(plan.model_copy(update={"devices": devices}), target)

    def code(text):
        return [line for line in re.split(r"[\r\n]", text) if not line.startswith("#") or "torchrun" in line]

    if target == "json":
        device = json.loads(named(name))["stages"][0]["devices"][0]
        assert device == {"name": f"{name}0", "title": name, "node": name, "index": 1}
        return
    assert code(named(name)) == code(named("plain"))
    two = make([5, 6], devices=[("alpha", 0, "A"), (name, 0, "A")])
    with pytest.raises(InputError):  # a name that would stand in a command is an address or nothing
        export.export(two, target)


@pytest.mark.parametrize("target, program", [("megatron", "torchrun"), ("vllm", "vllm"), ("sglang", "python"),
                                             ("llama.cpp", "llama-server")])
def test_a_shell_runs_what_is_pasted(target, program, tmp_path):
    stub = tmp_path / program
    stub.write_text('#!/bin/sh\nprintf "[%s]\\n" "$CUDA_VISIBLE_DEVICES" "$CUDA_DEVICE_ORDER" "$@"\n')
    stub.chmod(0o755)
    text = export.export(make([5, 6], devices=[("box", 3, "A"), ("box", 1, "A")]), target)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "10.0.0.9"}

    def run(**more):
        return subprocess.run(["bash", "-c", text], env=environment | more, cwd=tmp_path, capture_output=True,
                              text=True, timeout=60)

    done = run(MODEL="a model")
    assert done.returncode == 0 and not done.stderr
    words = [line[1:-1] for line in done.stdout.splitlines()]
    assert words[:2] == ["3,1", "PCI_BUS_ID"]
    if target == "megatron":
        assert words[words.index("--master_addr") + 1] == "10.0.0.9"
        assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*4|t*5L"
    else:
        assert "a model" in words
        without = run(MODEL="")
        assert without.returncode != 0 and "name or path of the model" in without.stderr


def test_docstring_examples():
    assert doctest.testmod(training).failed == 0
