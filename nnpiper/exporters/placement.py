"""What the exporters ask of a plan: its stages, its replicas, its nodes, and the lines that start its ranks.

Symbols: S stages, R replicas of every stage. A rank is one process on one device. Rank r runs replica r mod R of stage
r div R, so that ranks in order are the plan's devices in stage order: that is how Megatron-LM ("tp-cp-ep-dp-pp", the
pipeline slowest), DeepSpeed (PipeDataParallelTopology) and torchtitan (mesh pp, dp_replicate, ...) number them.

A format that cannot say what a plan says refuses it by InputError: the format, what it cannot hold and why, and what
is allowed.
"""

import re
from itertools import groupby

from ..plan_file import PlanDevice, PlanFile
from ..problem import InputError

_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MODEL = '"${MODEL:?name or path of the model}"'  # in a shell: the value of MODEL, or a stop with this message


def refuse(target: str, what: str, why: str, allowed: str) -> None:
    """Raise InputError: `target` cannot hold `what`."""
    raise InputError(f"{target}: {what}: {why}; allowed: {allowed}")


def comments(plan: PlanFile, target: str, trains: bool) -> list[str]:
    """Comment lines that tell a reader what the text is for; the comment sign is that of shell and Python."""
    bounds = plan.strategy.bounds(len(plan.layer_kinds))
    lines = [f"# {_shown(plan.model)} for {target}: {len(plan.groups)} stages, {plan.micro_batches} micro-batches of "
             f"{plan.micro_batch_size} x {plan.sequence_length} tokens, {plan.schedule}"]
    for s, group in enumerate(stages(plan)):
        names = ", ".join(f"{_shown(device.name)} ({_shown(device.title)})" for device in group)
        lines.append(f"# stage {s}: layers {bounds[s]}-{bounds[s + 1] - 1} of {len(plan.layer_kinds)} on {names}")
    if not trains:
        lines.append(f"# planned for training steps of {plan.step_s:.4g} s; a server runs forward passes alone")
    elif plan.transfers == "overlapped":
        lines.append(f"# planned step {plan.step_s:.4g} s with transfers beside compute; {target} waits for its sends, "
                     "so expect longer")
    else:
        lines.append(f"# planned step {plan.step_s:.4g} s")
    if trains and any(len(group) > 1 for group in plan.groups):
        lines.append("# replica i of a stage talks to replica i of the next; the plan reckoned with all pairs")
    return lines


def stages(plan: PlanFile) -> list[list[PlanDevice]]:
    """[S] the devices of each stage."""
    return [[plan.devices[k] for k in group] for group in plan.strategy.groups]


def stage_kinds(plan: PlanFile) -> list[list[str]]:
    """[S] the kinds of each stage's layers."""
    bounds = plan.strategy.bounds(len(plan.layer_kinds))
    return [plan.layer_kinds[left:right] for left, right in zip(bounds, bounds[1:])]


def check_chain(plan: PlanFile, target: str) -> None:
    """Refuse a model that is not one embedding, blocks and one head."""
    kinds = plan.layer_kinds
    expected = ["embedding", *["block"] * (len(kinds) - 2), "head"]
    if len(kinds) < 3:
        refuse(target, f"layer_kinds {kinds}", "a model has at least one block there", "an embedding, blocks, a head")
    for layer, (kind, wanted) in enumerate(zip(kinds, expected)):
        if kind in ("encoder", "decoder"):
            refuse(target, f"layer {layer} is of kind {kind!r}",
                   "the format holds one stack of blocks, not an encoder and a decoder", "an embedding, blocks, a head")
        if kind != wanted:
            refuse(target, f"layer {layer} of {len(kinds)} is of kind {kind!r}", f"{wanted!r} is expected there",
                   "an embedding, blocks, a head")


def check_schedule(plan: PlanFile, target: str) -> None:
    """Refuse all schedules but 1F1B."""
    if plan.schedule != "1f1b":
        refuse(target, f"schedule {plan.schedule!r}", "its pipelines run 1f1b alone", "a plan with schedule 1f1b")


def replicas(plan: PlanFile, target: str) -> int:
    """R, the number of devices of every stage, among which a micro-batch is shared evenly.

    The plan shares a micro-batch by speed; frameworks give every replica the same number of sequences.
    """
    groups = stages(plan)
    sizes = [len(group) for group in groups]
    R = sizes[0]
    if min(sizes) < max(sizes):
        refuse(target, f"stages of {', '.join(map(str, sizes))} devices",
               "the number of replicas is one for the whole pipeline", "as many devices on every stage")
    for s, group in enumerate(groups):
        titles = sorted({device.title for device in group})
        if len(titles) > 1:
            refuse(target, f"stage {s} on {' and '.join(map(_shown, titles))}",
                   "replicas get equal shares there, where the plan shares by speed", "one type of device in a stage")
    if plan.micro_batch_size % R:
        refuse(target, f"micro_batch_size {plan.micro_batch_size} on {R} replicas",
               "each gets a whole number of sequences", f"a plan with a multiple of {R}")
    return R


def single_devices(plan: PlanFile, target: str) -> list[PlanDevice]:
    """[S] the device of each stage."""
    for s, group in enumerate(plan.groups):
        if len(group) > 1:
            refuse(target, f"stage {s} has {len(group)} devices", "it has no replicas of a stage",
                   "one device on every stage")
    return [group[0] for group in stages(plan)]


def runs(target: str, devices: list[PlanDevice]) -> list[list[PlanDevice]]:
    """The devices in their order, neighbours on one node together: each run is one launcher's share of the ranks."""
    places = [(device.node, device.index) for device in devices]
    for i, place in enumerate(places):
        if place in places[:i]:
            refuse(target, f"devices {_shown(devices[places.index(place)].name)} and {_shown(devices[i].name)}",
                   f"both are index {place[1]} of node {place[0]!r}", "a place of its own for each device")
    nodes = {device.node for device in devices}
    for node in sorted(nodes):
        if len(nodes) > 1 and not _ADDRESS.fullmatch(node):
            refuse(target, f"node {node!r}", "with several nodes their names are written as addresses",
                   "a host name or IPv4 address")
    return [list(run) for _, run in groupby(devices, key=lambda device: device.node)]


def visible(devices: list[PlanDevice]) -> str:
    """Environment of a process that shall see these devices, in this order, as cuda:0, cuda:1, ..."""
    return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={','.join(str(device.index) for device in devices)}"


def master(parts: list[list[PlanDevice]]) -> str:
    """Shell text of the address of rank 0's node, which MASTER_ADDR overrides."""
    return f'"${{MASTER_ADDR:-{parts[0][0].node if len(parts) > 1 else "localhost"}}}"'


def torchrun(plan: PlanFile, target: str, script: str) -> list[str]:
    """Shell lines that start all ranks, a comment with the node before each.

    torchrun numbers ranks by --node_rank, each launcher's together, and launchers may have unequal numbers of ranks. So
    a plan whose stages go back and forth between nodes gets several launchers on one node, each with GPUs of its own.
    """
    parts = runs(target, [device for group in stages(plan) for device in group])
    lines, first = [], 0
    for i, part in enumerate(parts):
        lines += [
            f"# node {part[0].node!r}, ranks {first}-{first + len(part) - 1}",
            f"{visible(part)} torchrun --nnodes {len(parts)} --node_rank {i} --nproc_per_node {len(part)} "
            f'--master_addr {master(parts)} --master_port "${{MASTER_PORT:-29500}}" {script}']
        first += len(part)
    return lines


def _shown(text):
    return text if text.isprintable() else repr(text)  # a line break in a name would end the comment
