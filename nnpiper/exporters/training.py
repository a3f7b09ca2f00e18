"""Plans as text for training frameworks: Megatron-LM, DeepSpeed, torch.distributed.pipelining, torchtitan.

Symbols: S stages, R replicas of every stage. Where the text is Python, the lines that start the ranks are comments in
it. The Python texts are templates filled with numbers and module names alone, never with a user's words.
"""

import json
from itertools import groupby

from ..plan_file import PlanFile
from ..workload import MODELS
from .modules import FAMILIES, PLAIN, family, module_names
from .placement import (check_chain, check_schedule, comments, refuse, replicas, stage_kinds, torchrun)

_LETTERS = {"embedding": "E", "block": "t", "head": "L"}
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}  # as torch names them


def layout(stages: list[list[str]]) -> str:
    """Megatron's --pipeline-model-parallel-layout for stages of "embedding", "block" and "head" layers.

    With P ranks and more stages than ranks, stage k is virtual stage k div P of rank k mod P.

    >>> layout([["embedding", "block", "block"], ["block", "block", "block"], ["block", "head"]])
    'Et*2|t*3|tL'
    """
    return "|".join("".join(_LETTERS[kind] + (f"*{n}" if n > 1 else "") for kind, n in
                            ((kind, len(list(group))) for kind, group in groupby(stage))) for stage in stages)


def megatron(plan: PlanFile) -> str:
    """Bash for Megatron-LM: arguments in an array, then one torchrun line for each node."""
    check_chain(plan, "megatron")
    check_schedule(plan, "megatron")
    R, S = replicas(plan, "megatron"), len(plan.groups)
    arguments = [f"--num-layers {plan.layer_kinds.count('block')}", "--tensor-model-parallel-size 1",
                 f"--pipeline-model-parallel-size {S}"]
    if S > 1:
        arguments += [f'--pipeline-model-parallel-layout "{layout(stage_kinds(plan))}"']
    arguments += [f"--micro-batch-size {plan.micro_batch_size // R}",
                  f"--global-batch-size {plan.micro_batch_size * plan.micro_batches}",
                  f"--seq-length {plan.sequence_length}"]
    if plan.recompute:
        arguments += ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    script = "pretrain_bert.py" if family(plan) == "bert" else "pretrain_gpt.py"
    lines = [*comments(plan, "megatron", trains=True), "# add the arguments of model and data to every line",
             "PIPELINE_ARGS=(", *(f"    {argument}" for argument in arguments), ")",
             *torchrun(plan, "megatron", f'{script} "${{PIPELINE_ARGS[@]}}"')]
    return "\n".join(lines) + "\n"


_DEEPSPEED = '''
from deepspeed.pipe import PipelineModule

# stage s holds the layers PARTS[s] .. PARTS[s + 1] - 1
PARTS = {parts}
DS_CONFIG = {{"train_micro_batch_size_per_gpu": {micro_batch_size}, "gradient_accumulation_steps": {micro_batches}}}


class PlannedPipelineModule(PipelineModule):
    def __init__(self, layers, **kwargs):
        layers = list(layers)
        if len(layers) != PARTS[-1]:
            raise ValueError(f"{{len(layers)}} layers; the plan has {{PARTS[-1]}}, embedding and head included")
        super().__init__(layers, num_stages={S}, activation_checkpoint_interval={checkpoint}, **kwargs)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


def deepspeed(plan: PlanFile) -> str:
    """Python for DeepSpeed: PipelineModule with the plan's own split, which takes one item of `layers` for each layer
    of the plan. Forks with partition_method = 'manual' (diffusion-pipe) find their line among the comments."""
    check_schedule(plan, "deepspeed")
    R, S = replicas(plan, "deepspeed"), len(plan.groups)
    parts = list(plan.strategy.bounds(len(plan.layer_kinds)))
    lines = [*comments(plan, "deepspeed", trains=True),
             f"# as TOML of diffusion-pipe: partition_method = 'manual', partition_split = {parts[1:-1]}",
             *_commented(torchrun(plan, "deepspeed", "train.py"))]
    return "\n".join(lines) + "\n" + _DEEPSPEED.format(
        parts=parts, S=S, micro_batch_size=plan.micro_batch_size // R, micro_batches=plan.micro_batches,
        checkpoint=int(plan.recompute))


_TORCH = '''{imports}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import {schedule}, SplitPoint, pipeline
{checkpoint}
split_spec = {{{split_spec}}}


def build_schedule(module, mb_args, device, loss_fn):
    """The schedule of this rank, after init_process_group.

    mb_args: the arguments of one micro-batch, {micro_batch_size} x {sequence_length} tokens
    The schedule's step() takes a batch of {micro_batches} micro-batches: the input on the first stage, target= on the
    last.
    """
    mesh = init_device_mesh(device.type, ({S}, {R}), mesh_dim_names=("stage", "replica"))
    pipe = pipeline(module, mb_args=mb_args, split_spec=split_spec)
    stage = pipe.build_stage(mesh.get_local_rank("stage"), device, mesh.get_group("stage"))
{recompute}    return {schedule}(stage, n_microbatches={micro_batches}, loss_fn=loss_fn)
'''


# after the split, since pipeline() traces the model and drops the checkpoints in it
_TORCH_RECOMPUTE = '''    for name, block in list(stage.submod.named_modules()):
        if name.rpartition(".")[0] == "{blocks}":  # recomputed in the backward pass
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
'''


def torch(plan: PlanFile) -> str:
    """Python for torch.distributed.pipelining: split_spec and a function that builds the schedule."""
    check_chain(plan, "torch")
    _check_torch_schedule(plan, "torch")
    R = replicas(plan, "torch")
    table = FAMILIES.get(family(plan), PLAIN)
    names = module_names(plan.layer_kinds, table)
    notes = []
    if plan.model in MODELS and MODELS[plan.model].tied and len(plan.groups) > 1:
        notes += ["# embedding and head share a weight: add up the gradients of its copies on first and last stage"]
    if R > 1:
        notes += ['# average the gradients over mesh.get_group("replica") once a step']
    spec = "".join(f'\n    "{names[cut][0]}": SplitPoint.BEGINNING,' for cut in plan.cuts)
    lines = [*comments(plan, "torch", trains=True), *notes, *_commented(torchrun(plan, "torch", "train.py"))]
    return "\n".join(lines) + "\n" + _TORCH.format(
        imports="\nfrom functools import partial\n" if plan.recompute else "",
        checkpoint="from torch.utils.checkpoint import checkpoint\n" if plan.recompute else "",
        recompute=_TORCH_RECOMPUTE.format(blocks=table["block"].removesuffix(".{}")) if plan.recompute else "",
        schedule=f"Schedule{_SCHEDULES[plan.schedule]}", split_spec=spec and spec + "\n", S=len(plan.groups), R=R,
        micro_batch_size=plan.micro_batch_size // R, sequence_length=plan.sequence_length,
        micro_batches=plan.micro_batches)


_TORCHTITAN = '''
def planned(config):
    """A configuration of torchtitan's config registry, with the plan in it."""
    config.training.local_batch_size = {local_batch_size}
    config.training.seq_len = {sequence_length}
    config.parallelism.data_parallel_replicate_degree = {R}
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.tensor_parallel_degree = 1
    config.parallelism.pipeline_parallel_degree = {S}
    config.parallelism.pipeline_parallel_schedule = "{schedule}"
    config.parallelism.pipeline_parallel_microbatch_size = {micro_batch_size}
    config.parallelism.module_fqns_per_model_part = [
{parts}
    ]
    config.activation_checkpoint.mode = "{checkpoint}"
    return config
'''


def torchtitan(plan: PlanFile) -> str:
    """Python for torchtitan: a function that puts the plan into a configuration."""
    check_chain(plan, "torchtitan")
    if family(plan) in ("gpt", "bert"):
        refuse("torchtitan", f"model {plan.model!r}", "its models hold tok_embeddings, layers, norm and output, and "
               "what is listed on no stage, as position embeddings, is deleted", "models of the Llama family")
    _check_torch_schedule(plan, "torchtitan")
    R = replicas(plan, "torchtitan")
    bounds, names = plan.strategy.bounds(len(plan.layer_kinds)), module_names(plan.layer_kinds, PLAIN)
    parts = [[name for layer in names[left:right] for name in layer] for left, right in zip(bounds, bounds[1:])]
    lines = [*comments(plan, "torchtitan", trains=True),
             *_commented(torchrun(plan, "torchtitan", "-m torchtitan.train"))]
    return "\n".join(lines) + "\n\n" + _TORCHTITAN.format(
        local_batch_size=plan.micro_batch_size // R * plan.micro_batches, sequence_length=plan.sequence_length, R=R,
        S=len(plan.groups), schedule=_SCHEDULES[plan.schedule], micro_batch_size=plan.micro_batch_size // R,
        parts="\n".join(f"        {json.dumps(part)}," for part in parts),
        checkpoint="full" if plan.recompute else "none")


def _check_torch_schedule(plan, target):
    S = len(plan.groups)
    if plan.schedule == "1f1b" and plan.micro_batches < S:
        refuse(target, f"{plan.micro_batches} micro-batches on {S} stages",
               "torch's Schedule1F1B needs as many micro-batches as stages", f"{S} or more, or schedule gpipe")


def _commented(lines):
    return [line if line.startswith("#") else f"# {line}" for line in lines]
