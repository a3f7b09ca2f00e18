"""Plans as text that pastes into other frameworks: the split, the device order and the lines that start the ranks.

Each format has a parser of its documented grammar in tests/export_parsers.py, to which every export is held.
"""

import json
from collections import Counter

from .exporters import serving, training
from .exporters.placement import stages
from .plan_file import PlanFile, check
from .problem import check_choice


def export(plan: PlanFile, target: str) -> str:
    """The plan as text for one of TARGETS. Raises InputError: an invalid plan, an unknown target, or a format that
    cannot hold the plan, with what and why."""
    check_choice("target", target, TARGETS)
    check(plan)
    return _EXPORTERS[target](plan)


def _json(plan: PlanFile) -> str:
    """The plan by stages, for programs: which layers, how many of each kind, and the devices by name and place."""
    fields = plan.model_dump(exclude={"format", "layer_kinds", "devices", "cuts", "groups"})
    bounds = plan.strategy.bounds(len(plan.layer_kinds))
    fields["stages"] = [
        {"first_layer": left, "last_layer": right - 1, "layers": Counter(plan.layer_kinds[left:right]),
         "devices": [device.model_dump() for device in group]}
        for left, right, group in zip(bounds, bounds[1:], stages(plan))]
    return json.dumps(fields, indent=2) + "\n"


_EXPORTERS = {
    "megatron": training.megatron, "deepspeed": training.deepspeed, "torch": training.torch,
    "torchtitan": training.torchtitan, "vllm": serving.vllm, "sglang": serving.sglang, "llama.cpp": serving.llama_cpp,
    "accelerate": serving.accelerate, "json": _json}
TARGETS = tuple(_EXPORTERS)
