"""Parsers of the formats that plans are exported to, written from the frameworks' documentation, not the exporters.

Each takes the exported text and what the framework knows of the model by itself, its family and number of blocks, and
asserts what the framework would. Symbols: S stages, R replicas of every stage.
"""

import argparse
import ast
import json
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np


@dataclass
class Parsed:
    """blocks, layers: [S], layers with embedding and head, None where the format does not place those
    devices: [S][R] of (node, index in the node)"""

    blocks: list[int]
    devices: list[list[tuple[str, int]]]
    layers: list[int] | None = None
    settings: dict = field(default_factory=dict)


def megatron(text, family, blocks):
    body = re.search(r"PIPELINE_ARGS=\(\n(.*?)\n\)\n", text, re.DOTALL)[1]
    options = _arguments(shlex.split(body), """
        --num-layers= --tensor-model-parallel-size= --pipeline-model-parallel-size= --pipeline-model-parallel-layout=
        --micro-batch-size= --global-batch-size= --seq-length= --recompute-granularity= --recompute-method=
        --recompute-num-layers=""")
    P, ranks = int(options.pipeline_model_parallel_size), _torchrun(text)
    assert int(options.num_layers) == blocks and options.tensor_model_parallel_size == "1"
    if options.pipeline_model_parallel_layout is None:
        assert P == 1  # nothing else given: an even split
        stages = [["E", *"t" * blocks, "L"]]
    else:
        by_rank = megatron_layout(options.pipeline_model_parallel_layout, P)
        assert all(len(virtual) == 1 for virtual in by_rank)
        stages = [virtual[0] for virtual in by_rank]
    assert sum(stage.count("t") for stage in stages) == blocks
    R = len(ranks) // P
    assert len(ranks) == P * R
    micro, batch = int(options.micro_batch_size), int(options.global_batch_size)
    assert batch % (micro * R) == 0
    return Parsed([stage.count("t") for stage in stages], _by_stage(ranks, P), [len(stage) for stage in stages], {
        "micro_batch_size": micro * R, "micro_batches": batch // (micro * R),
        "sequence_length": int(options.seq_length), "schedule": "1f1b",
        "recompute": options.recompute_granularity == "full"})


def megatron_layout(text, P):
    """[P][V] the items of each virtual stage of each pipeline rank. The grammar, in full:

    layout = stage {"|" stage}; stage = {item}; item = one of E t m L, [*n]; a group "(" text ")*" n stands for its text
    n times, without nesting; commas mean nothing. E once and first, L once and last, m after every t.
    """
    text = text.replace(",", "")
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    assert re.fullmatch(r"(?:[EtmL](?:\*\d+)?|\|)+", text), text
    text = re.sub(r"([EtmL])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    stages = [list(stage) for stage in text.split("|")]
    items = [item for stage in stages for item in stage]
    assert items[0] == "E" and items[-1] == "L" and items.count("E") == items.count("L") == 1
    assert "t" not in items[items.index("m"):] if "m" in items else True
    assert len(stages) % P == 0
    return [stages[rank::P] for rank in range(P)]


def deepspeed(text, family, blocks):
    """Runs the text's class on a base class that calls it as deepspeed.pipe.PipelineModule does."""
    ranks, world = _torchrun(text), {}

    class PipelineModule:
        def __init__(self, layers, num_stages=None, partition_method="parameters", activation_checkpoint_interval=0,
                     loss_fn=None):
            assert len(ranks) % num_stages == 0
            R = len(ranks) // num_stages
            self.global_rank = world["rank"]
            self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank // R, data=rank % R),
                                         get_dim=lambda axis: {"pipe": num_stages, "data": R}[axis])
            self._layer_specs, self.num_stages = list(layers), num_stages
            self.interval, self.loss_fn = activation_checkpoint_interval, loss_fn
            self._partition_layers(method=partition_method)

        def _set_bounds(self, start=None, stop=None):
            self.bounds = start, stop

    package, module = ModuleType("deepspeed"), ModuleType("deepspeed.pipe")
    module.PipelineModule = PipelineModule
    names = {}
    with patch.dict(sys.modules, {"deepspeed": package, "deepspeed.pipe": module}):
        exec(compile(text, "exported", "exec"), names)

    kinds = ["embedding", *["block"] * blocks, "head"] if family != "t5" else [
        "embedding", *["encoder"] * blocks, "embedding", *["decoder"] * blocks, "head"]
    pipes = []
    for world["rank"] in range(len(ranks)):
        pipes.append(names["PlannedPipelineModule"](kinds, loss_fn="loss"))
        assert pipes[-1].loss_fn == "loss"
    try:
        names["PlannedPipelineModule"](kinds[1:])
        raise AssertionError("a model of another length is taken")
    except ValueError:
        pass
    S = pipes[0].num_stages
    R = len(ranks) // S
    bounds = [pipe.bounds for pipe in pipes]
    assert all(bounds[rank] == bounds[rank - rank % R] for rank in range(len(ranks)))  # replicas hold the same
    bounds = bounds[::R]
    assert bounds[0][0] == 0 and bounds[-1][1] == len(kinds)
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:]))
    assert pipes[0].parts == [0, *(stop for _, stop in bounds)]
    method, split = re.search(r"(partition_method = '\w+'), (partition_split = \[.*\])", text).groups()
    fork = tomllib.loads(f"{method}\n{split}")
    assert fork == {"partition_method": "manual", "partition_split": pipes[0].parts[1:-1]}
    config = names["DS_CONFIG"]
    counted = ("block", "encoder", "decoder")
    return Parsed([sum(kind in counted for kind in kinds[a:b]) for a, b in bounds], _by_stage(ranks, S),
                  [b - a for a, b in bounds], {
                      "micro_batch_size": config["train_micro_batch_size_per_gpu"] * R, "schedule": "1f1b",
                      "micro_batches": config["gradient_accumulation_steps"], "recompute": pipes[0].interval == 1})


# the modules that hold each family's weights: embedding, one block, head
_MODULES = {
    "gpt": (["transformer.wte", "transformer.wpe"], "transformer.h.{}", ["transformer.ln_f", "lm_head"]),
    "llama": (["model.embed_tokens"], "model.layers.{}", ["model.norm", "lm_head"]),
    "bert": (["bert.embeddings"], "bert.encoder.layer.{}", ["bert.pooler", "cls"]),
    None: (["tok_embeddings"], "layers.{}", ["norm", "output"]),
}


def torch(text, family, blocks):
    tree, ranks = ast.parse(text), _torchrun(text)
    spec = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "split_spec")
    assert all(ast.unparse(value) == "SplitPoint.BEGINNING" for value in spec.values)
    _, block, head = _MODULES[family]
    order = [block.format(i) for i in range(blocks)] + [head[0]]  # what a stage can begin with
    cuts = [1 + order.index(ast.literal_eval(key)) for key in spec.keys]
    bounds = [0, *cuts, blocks + 2]
    assert bounds == sorted(set(bounds))
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    name, call = next((name, node) for name, node in calls.items() if name.startswith("Schedule"))
    mesh = ast.literal_eval(calls["init_device_mesh"].args[1])
    S, R = mesh
    assert S == len(bounds) - 1 and S * R == len(ranks)
    M = next(ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "n_microbatches")
    assert name != "Schedule1F1B" or M >= S
    layers = [right - left for left, right in zip(bounds, bounds[1:])]
    held = [layers[s] - (s == 0) - (s == S - 1) for s in range(S)]
    return Parsed(held, _by_stage(ranks, S), layers, {
        "micro_batches": M, "schedule": {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}[name]})


def torchtitan(text, family, blocks):
    ranks, names = _torchrun(text), {}
    exec(compile(text, "exported", "exec"), names)
    config = names["planned"](SimpleNamespace(
        training=SimpleNamespace(), parallelism=SimpleNamespace(), activation_checkpoint=SimpleNamespace()))
    parallelism, parts = config.parallelism, config.parallelism.module_fqns_per_model_part
    S, R = parallelism.pipeline_parallel_degree, parallelism.data_parallel_replicate_degree
    assert len(parts) == S and S * R == len(ranks)
    assert parallelism.data_parallel_shard_degree == parallelism.tensor_parallel_degree == 1
    embedding, block, head = _MODULES[None]
    # every module once and in order: what is on no stage is deleted
    assert [name for part in parts for name in part] == embedding + [block.format(i) for i in range(blocks)] + head
    held = [sum(name.startswith("layers.") for name in part) for part in parts]
    layers = [n + ("tok_embeddings" in part) + ("output" in part) for n, part in zip(held, parts)]
    assert all(("norm" in part) == ("output" in part) for part in parts)
    micro, batch = parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size
    assert batch % micro == 0
    assert parallelism.pipeline_parallel_schedule != "1F1B" or batch // micro >= S
    return Parsed(held, _by_stage(ranks, S), layers, {
        "micro_batch_size": micro * R, "micro_batches": batch // micro, "sequence_length": config.training.seq_len,
        "schedule": {"1F1B": "1f1b", "GPipe": "gpipe"}[parallelism.pipeline_parallel_schedule],
        "recompute": {"full": True, "none": False}[config.activation_checkpoint.mode]})


def vllm(text, family, blocks):
    return _server(text, blocks, "VLLM_PP_LAYER_PARTITION", ["vllm", "serve"], "--pipeline-parallel-size", """
        --tensor-parallel-size= --pipeline-parallel-size= --distributed-executor-backend= --nnodes= --node-rank=
        --master-addr= --headless""")


def sglang(text, family, blocks):
    return _server(text, blocks, "SGLANG_PP_LAYER_PARTITION", ["python", "-m", "sglang.launch_server"], "--pp-size", """
        --model-path= --tp-size= --pp-size= --nnodes= --node-rank= --dist-init-addr=""")


def llama_cpp(text, family, blocks):
    """Device of a position (block, or last the output layer): the first whose share of the sum lies beyond it, in
    32-bit arithmetic; with enough -ngl all positions are counted, else the first blocks would stay on the CPU."""
    servers, devices = {}, {}
    for node, environment, words in _launchers(text):
        visible = _visible(environment)
        if words[0] == "rpc-server":
            options = _arguments(words[1:], "--host= --port= --device=")
            servers[f"{node}:{options.port}"] = [
                (node, visible[int(name.removeprefix("CUDA"))]) for name in options.device.split(",")]
            continue
        assert words[0] == "llama-server"
        options = _arguments(words[1:], "-m= --rpc= -sm= -dev= -ts= -ngl=")
        devices |= {f"CUDA{i}": (node, index) for i, index in enumerate(visible)}
    used = options.rpc.split(",") if options.rpc else []
    assert sorted(used) == sorted(servers)
    devices |= {f"RPC{i}": place for i, place in enumerate(place for address in used for place in servers[address])}
    order, shares = options.dev.split(","), np.array(options.ts.split(","), np.float32)
    assert options.sm == "layer" and len(order) == len(shares) == len(set(order)) <= 16
    positions = min(int(options.ngl), blocks + 1)
    assert positions == blocks + 1
    ends = np.cumsum(shares, dtype=np.float32) / shares.sum(dtype=np.float32)
    owner = [int(np.searchsorted(ends, np.float32(i) / np.float32(positions), side="right")) for i in range(positions)]
    S = len(order)
    assert owner[-1] == S - 1
    return Parsed([owner[:-1].count(s) for s in range(S)], [[devices[name]] for name in order])


def accelerate(text, family, blocks):
    tree = ast.parse(text)
    values = {ast.unparse(node.targets[0]): ast.literal_eval(node.value)
              for node in tree.body if isinstance(node, ast.Assign)}
    visible = [int(index) for index in values["os.environ['CUDA_VISIBLE_DEVICES']"].split(",")]
    assert values["os.environ['CUDA_DEVICE_ORDER']"] == "PCI_BUS_ID"
    device_map = values["device_map"]
    keys = [key for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "device_map"
            for key in node.value.keys]
    assert len(keys) == len(device_map)  # no module twice

    def device(weight):
        return next(place for name, place in device_map.items() if weight == name or weight.startswith(name + "."))

    if family == "t5":
        layers = [device("shared.weight"), *(device(f"encoder.block.{i}.layer.0.weight") for i in range(blocks)),
                  device("encoder.final_layer_norm.weight"),
                  *(device(f"decoder.block.{i}.layer.0.weight") for i in range(blocks)), device("lm_head.weight")]
        assert device("encoder.embed_tokens.weight") == device("decoder.embed_tokens.weight") == layers[0]
        assert device("decoder.final_layer_norm.weight") == layers[-1]
        held = layers[1:blocks + 1] + layers[blocks + 2:-1]
    else:
        embedding, block, head = _MODULES[family]
        first, last = [device(name + ".weight") for name in embedding], [device(name + ".weight") for name in head]
        held = [device(block.format(i) + ".mlp.weight") for i in range(blocks)]
        assert len(set(first)) == len(set(last)) == 1
        layers = [first[0], *held, last[0]]
    S = len(visible)
    assert layers == sorted(layers) and set(layers) == set(range(S))
    return Parsed([held.count(s) for s in range(S)], [[(None, index)] for index in visible],
                  [layers.count(s) for s in range(S)])


def json_(text, family, blocks):
    fields = json.loads(text)
    stages = fields["stages"]
    assert [stage["first_layer"] for stage in stages[1:]] == [stage["last_layer"] + 1 for stage in stages[:-1]]
    layers = [stage["last_layer"] - stage["first_layer"] + 1 for stage in stages]
    assert layers == [sum(stage["layers"].values()) for stage in stages]
    counted = ("block", "encoder", "decoder")
    return Parsed([sum(stage["layers"].get(kind, 0) for kind in counted) for stage in stages],
                  [[(device["node"], device["index"]) for device in stage["devices"]] for stage in stages], layers,
                  {name: fields[name] for name in ("micro_batches", "micro_batch_size", "sequence_length", "schedule",
                                                   "recompute")})


PARSERS = {"megatron": megatron, "deepspeed": deepspeed, "torch": torch, "torchtitan": torchtitan, "vllm": vllm,
           "sglang": sglang, "llama.cpp": llama_cpp, "accelerate": accelerate, "json": json_}


def _launchers(text):
    """(node, environment, words) of every line that starts something, in Python text a comment."""
    node, found = None, []
    for line in text.splitlines():
        if match := re.match(r"# node ('.*?'|\".*?\")(?:,.*)?$", line):
            node = ast.literal_eval(match[1])
        line = line.removeprefix("# ")
        if not line.startswith("CUDA_DEVICE_ORDER="):
            continue
        # as a shell with no variables set expands them
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in shlex.split(line)]
        start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
        found.append((node, dict(word.split("=", 1) for word in words[:start]), words[start:]))
    return found


def _visible(environment):
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    return [int(index) for index in environment["CUDA_VISIBLE_DEVICES"].split(",")]


def _torchrun(text):
    """(node, index) of every rank."""
    launchers, ranks = _launchers(text), []
    for i, (node, environment, words) in enumerate(launchers):
        assert words[0] == "torchrun"
        options, _ = _parser("--nnodes= --node_rank= --nproc_per_node= --master_addr= --master_port=").parse_known_args(
            words[1:])
        visible = _visible(environment)
        assert int(options.nnodes) == len(launchers) and int(options.node_rank) == i
        assert int(options.nproc_per_node) == len(visible) == len(set(visible)) and int(options.master_port) < 65536
        assert options.master_addr == (launchers[0][0] if len(launchers) > 1 else "localhost")
        ranks += [(node, index) for index in visible]
    return ranks


def _server(text, blocks, variable, program, size, options):
    """vLLM and SGLang: S ranks, numbered node by node, the same number on every node."""
    launchers, devices = _launchers(text), []
    for i, (node, environment, words) in enumerate(launchers):
        assert words[:len(program)] == program
        if program[0] == "vllm":  # the model is positional
            assert words[2].startswith("${MODEL:?")
            words = words[:2] + words[3:]
        arguments = vars(_arguments(words[len(program):], options))
        partition = [int(count) for count in environment[variable].split(",")]
        S = int(arguments[size.strip("-").replace("-", "_")])
        assert len(partition) == S and sum(partition) == blocks and min(partition) > 0
        visible = _visible(environment)
        assert len(visible) * len(launchers) == S
        if len(launchers) > 1:
            assert int(arguments["nnodes"]) == len(launchers) and int(arguments["node_rank"]) == i
            address = arguments.get("master_addr") or arguments["dist_init_addr"].rsplit(":", 1)[0]
            assert address == launchers[0][0] and bool(arguments.get("headless")) == (program[0] == "vllm" and i > 0)
        else:
            assert arguments["nnodes"] is None
        devices += [[(node, index)] for index in visible]
    assert len({node for node, _, _ in launchers}) == len(launchers)
    return Parsed(partition, devices)


def _parser(options):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in options.split():
        if option.endswith("="):
            parser.add_argument(option[:-1])
        else:
            parser.add_argument(option, action="store_true")
    return parser


def _arguments(words, options):
    return _parser(options).parse_args(words)


def _by_stage(ranks, S):
    """[S][R]: rank r runs replica r mod R of stage r div R."""
    R = len(ranks) // S
    return [ranks[s * R:(s + 1) * R] for s in range(S)]
