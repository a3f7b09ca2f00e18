"""Plan files: a strategy together with the names that the model and the cluster give its layers and devices.

`nnpiper plan --json` writes one and `nnpiper export` reads it. Symbols: L layers, K devices, S stages.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .problem import SCHEDULES, TRANSFERS, InputError, Strategy, read_json

_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(strict=True, ge=1)]
_Index = Annotated[int, Field(strict=True, ge=0)]
_Seconds = _Rate = _Bytes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class PlanDevice(BaseModel):
    """A device as its user knows it; `index` is its place within its node, as CUDA_VISIBLE_DEVICES counts."""

    model_config = ConfigDict(extra="forbid")
    name: _Text
    title: _Text
    node: _Text
    index: _Index


class StageFigures(BaseModel):
    """One stage: times of one micro-batch (all_reduce_s: of one step), shares of every micro-batch by device, memory of
    the device with the least room."""

    model_config = ConfigDict(extra="forbid")
    forward_s: _Seconds
    backward_s: _Seconds
    send_s: _Seconds
    all_reduce_s: _Seconds
    idle_share: _Share
    shares: list[_Share]
    memory_used_bytes: _Bytes
    memory_available_bytes: _Bytes


class PlanFigures(BaseModel):
    """What planning predicts of a plan beside its step, as `planning.Plan` explains; no export needs it."""

    model_config = ConfigDict(extra="forbid")
    objective: Literal["throughput", "latency"]
    latency_s: _Seconds
    samples_per_s: _Rate | None
    tokens_per_s: _Rate | None
    bubble: _Share
    bottleneck: _Text
    even_s: _Seconds | None
    bound_s: _Seconds | None
    unused: list[_Text]
    advice: list[_Text]
    stages: list[StageFigures]


class PlanFile(BaseModel):
    """What a plan file holds.

    layer_kinds: [L] of "embedding", "block", "encoder", "decoder", "head"
    cuts, groups: as in problem.Strategy, device numbers are places in `devices`
    step_s: predicted time of one training step
    figures: what else is predicted; None in files written by hand
    """

    model_config = ConfigDict(extra="forbid")
    format: Literal["nnpiper-plan-1"] = "nnpiper-plan-1"
    model: _Text
    layer_kinds: Annotated[list[Literal["embedding", "block", "encoder", "decoder", "head"]], Field(min_length=1)]
    micro_batches: _Count
    micro_batch_size: _Count
    sequence_length: _Count
    schedule: Literal[SCHEDULES]
    transfers: Literal[TRANSFERS]
    recompute: bool
    devices: Annotated[list[PlanDevice], Field(min_length=1)]
    cuts: list[_Index]
    groups: list[list[_Index]]
    step_s: _Seconds
    figures: PlanFigures | None = None

    @property
    def strategy(self) -> Strategy:
        return Strategy(tuple(self.cuts), tuple(map(tuple, self.groups)))

    @property
    def layer_counts(self) -> list[int]:
        """[S] layers of each stage, embedding and head included."""
        bounds = self.strategy.bounds(len(self.layer_kinds))
        return [right - left for left, right in zip(bounds, bounds[1:])]


def read(path) -> PlanFile:
    """Read and check a plan file. Raises InputError: one line with file, field, value and what is allowed."""
    plan = read_json(path, PlanFile)
    try:
        check(plan)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return plan


def check(plan: PlanFile) -> None:
    """Raise InputError unless the strategy is valid for the plan's own layers and devices, and names are unique."""
    plan.strategy.check_sizes(len(plan.layer_kinds), len(plan.devices), len(plan.groups))
    names = [device.name for device in plan.devices]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise InputError(f"devices: name {double!r} twice; allowed: unique names")
