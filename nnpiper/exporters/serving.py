"""Plans as text for servers: vLLM, SGLang, llama.cpp, Hugging Face accelerate.

A server keeps the plan's split and device order; schedule, micro-batches and recomputation do not concern it.
"""

from ..plan_file import PlanDevice, PlanFile
from ..workload import MODELS
from .modules import FAMILIES, family, module_names
from .placement import (MODEL, check_chain, comments, master, refuse, runs, single_devices, stage_kinds, visible)

LLAMA_CPP_DEVICES = 16  # llama_max_devices()
_RPC_PORT = 50052


def vllm(plan: PlanFile) -> str:
    """Bash for vLLM: one `vllm serve` for each node."""
    partition, parts = _layer_partition(plan, "vllm", without_pipelines=("bert",))
    lines = comments(plan, "vllm", trains=False)
    for i, part in enumerate(parts):
        line = (f'{visible(part)} VLLM_PP_LAYER_PARTITION="{partition}" vllm serve {MODEL} --tensor-parallel-size 1 '
                f"--pipeline-parallel-size {len(plan.groups)}")
        if len(parts) > 1:
            line += (f" --distributed-executor-backend mp --nnodes {len(parts)} --node-rank {i} "
                     f"--master-addr {master(parts)}" + (" --headless" if i else ""))
        lines += [f"# node {part[0].node!r}", line]
    return "\n".join(lines) + "\n"


def sglang(plan: PlanFile) -> str:
    """Bash for SGLang: one `sglang.launch_server` for each node."""
    # SGLang pipelines a model whose forward takes pp_proxy_tensors; those of its GPT-2 and BERT do not
    partition, parts = _layer_partition(plan, "sglang", without_pipelines=("gpt", "bert"))
    lines = comments(plan, "sglang", trains=False)
    for i, part in enumerate(parts):
        line = (f'{visible(part)} SGLANG_PP_LAYER_PARTITION="{partition}" python -m sglang.launch_server '
                f"--model-path {MODEL} --tp-size 1 --pp-size {len(plan.groups)}")
        if len(parts) > 1:
            line += (f" --nnodes {len(parts)} --node-rank {i} "
                     f'--dist-init-addr {master(parts)}:"${{MASTER_PORT:-50000}}"')
        lines += [f"# node {part[0].node!r}", line]
    return "\n".join(lines) + "\n"


def llama_cpp(plan: PlanFile) -> str:
    """Bash for llama.cpp: `llama-server` on the first stage's node, an `rpc-server` on each other node.

    -ts is cut over the blocks and the output layer; counts that sum to their number fall on the very same cuts. The
    input layer stays on the CPU. RPC devices are numbered in the order of --rpc, each server's in that of --device.
    """
    check_chain(plan, "llama.cpp")
    devices = single_devices(plan, "llama.cpp")
    if len(devices) > LLAMA_CPP_DEVICES:
        refuse("llama.cpp", f"{len(devices)} stages", "it splits over a limited number of devices",
               f"at most {LLAMA_CPP_DEVICES}")
    counts = [len(kinds) - kinds.count("embedding") for kinds in stage_kinds(plan)]
    _check_filled("llama.cpp", counts, "-ts counts blocks and output layer; the embedding stays on the CPU")
    runs("llama.cpp", devices)  # for its checks alone: any order of nodes is possible here
    here, *others = list(dict.fromkeys(device.node for device in devices))
    mine = {node: [device for device in devices if device.node == node] for node in (here, *others)}
    names = {id(device): f"CUDA{i}" for i, device in enumerate(mine[here])}
    remote = [device for node in others for device in mine[node]]
    names |= {id(device): f"RPC{i}" for i, device in enumerate(remote)}

    lines = comments(plan, "llama.cpp", trains=False)
    for node in others:
        cuda = ",".join(f"CUDA{i}" for i in range(len(mine[node])))
        lines += [f"# node {node!r}, first; no open network may reach this port",
                  f"{visible(mine[node])} rpc-server --host 0.0.0.0 --port {_RPC_PORT} --device {cuda}"]
    rpc = f" --rpc {','.join(f'{node}:{_RPC_PORT}' for node in others)}" if others else ""
    lines += [f"# node {here!r}",
              f"{visible(mine[here])} llama-server -m {MODEL}{rpc} -sm layer -dev "
              f"{','.join(names[id(device)] for device in devices)} -ts {','.join(map(str, counts))} "
              f"-ngl {max(999, sum(counts))}"]
    return "\n".join(lines) + "\n"


def accelerate(plan: PlanFile) -> str:
    """Python for accelerate and transformers: a device_map of every module."""
    devices = single_devices(plan, "accelerate")
    nodes = sorted({device.node for device in devices})
    if len(nodes) > 1:
        refuse("accelerate", f"nodes {', '.join(map(repr, nodes))}", "a device_map is of one process on one node",
               "devices of one node")
    runs("accelerate", devices)
    names = family(plan)
    if names is None:
        refuse("accelerate", f"model {plan.model!r}", "the names of its modules are not known",
               ", ".join(MODELS))
    kinds = stage_kinds(plan)
    if names == "t5":
        _check_t5(plan, kinds)
    else:
        check_chain(plan, "accelerate")
    stage = [s for s, stage in enumerate(kinds) for _ in stage]
    modules = module_names(plan.layer_kinds, FAMILIES[names])
    lines = [
        *comments(plan, "accelerate", trains=False), "import os", "",
        'os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"',
        f'os.environ["CUDA_VISIBLE_DEVICES"] = "{",".join(str(device.index) for device in devices)}"'
        "  # before CUDA starts",
        "device_map = {", *(f'    "{name}": {s},' for s, layer in zip(stage, modules) for name in layer), "}",
        "# model = AutoModel....from_pretrained(..., device_map=device_map)"]
    return "\n".join(lines) + "\n"


def _layer_partition(plan, target, without_pipelines) -> tuple[str, list[list[PlanDevice]]]:
    """Blocks of each stage as text, and the devices of each node; both servers number ranks node by node, with as many
    ranks on each, and count blocks alone: the embedding is on the first stage and the head on the last."""
    check_chain(plan, target)
    if family(plan) in without_pipelines and len(plan.groups) > 1:
        refuse(target, f"model {plan.model!r}", f"its implementation of the {family(plan)} family has no pipeline "
               "parallelism", "one stage, or another family")
    devices = single_devices(plan, target)
    counts = [kinds.count("block") for kinds in stage_kinds(plan)]
    _check_filled(target, counts, "blocks alone are counted, not embedding and head")
    parts = runs(target, devices)
    nodes = [part[0].node for part in parts]
    for node in nodes:
        if nodes.count(node) > 1:
            refuse(target, f"stages on nodes {', '.join(nodes)}", "ranks are numbered node by node",
                   "neighbouring stages on each node")
    sizes = [len(part) for part in parts]
    if min(sizes) < max(sizes):
        refuse(target, f"nodes with {', '.join(map(str, sizes))} stages", "every node runs as many ranks",
               "as many stages on every node")
    return ",".join(map(str, counts)), parts


def _check_filled(target, counts, why):
    for s, count in enumerate(counts):
        if count == 0:
            refuse(target, f"stage {s} would be an empty stage", why, "at least one layer of those on every stage")


def _check_t5(plan, kinds):
    shape = [kind for i, kind in enumerate(plan.layer_kinds) if i == 0 or kind != plan.layer_kinds[i - 1]]
    if shape != ["embedding", "encoder", "embedding", "decoder", "head"]:
        refuse("accelerate", f"layer_kinds {', '.join(shape)}", f"{plan.model!r} is an encoder and a decoder",
               "embedding, encoder, embedding, decoder, head")
    places = [s for s, stage in enumerate(kinds) for kind in stage if kind == "embedding"]
    if places[0] != places[1]:
        refuse("accelerate", f"the embeddings of encoder and decoder on stages {places[0]} and {places[1]}",
               "they are one module", "both on one stage")
