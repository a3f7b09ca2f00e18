"""Profiles: how long one device really takes for the layers of one model, as `nnpiper profile` measures and files it.

Symbols: L layers; a kind is one of KINDS, as in workload.Workload. A profile holds one time a kind and pass, taken as
that of the first layer of the kind in the profiled chain. Another layer of the kind, of the same model or another, with
another micro-batch or sequence, is taken to last

    time(layer) = measured time x work(layer) / work(first layer of its kind in the profiled chain),

where work is the FLOPs of that pass, forward or backward. The embedding, a look-up that moves bytes, has no FLOPs: its
work is the output bytes, and backward also those of its gradient, since torch makes and adds a gradient of the whole
table, however few of its rows a micro-batch reads. The layers that were measured so keep their measured times exactly.

The limit of this: rate is taken to be independent of size, although small matrices and what is not a matrix product
(norms, softmax, the head's loss, adding up of gradients, starting of kernels) behave otherwise. It is good near the
measured sizes and a guess at ten times them. Data type and attention kernel stay those of the profile. Measure with the
micro-batch and sequence that will be trained.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from .problem import InputError, read_json
from .workload import Model, Workload, chain

KINDS = ("embedding", "block", "encoder", "decoder", "head")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KindTimes:
    """Medians over the runs and their interquartile ranges, for one micro-batch of one layer of a kind."""

    forward_s: float
    backward_s: float
    forward_spread_s: float
    backward_spread_s: float


@dataclass(frozen=True)
class Profile:
    """What one device measured for one model, micro-batch size, sequence length, recompute flag and data type.

    device: title to show; processor: the name that the hardware reports
    memory_bytes: of the whole device, no reserve taken off; None where it is not the device's own (a CPU)
    kinds: by name of the kind
    runs: timed passes behind each median
    date: ISO 8601

    Raises InputError for a kind that the model does not have and for sizes that `workload.chain` refuses.
    """

    device: str
    memory_bytes: float | None
    model: Model
    micro_batch_size: int
    sequence_length: int
    recompute: bool
    dtype: str
    kinds: dict[str, KindTimes]
    runs: int
    processor: str
    torch_version: str
    date: str

    def __post_init__(self):
        known = dict.fromkeys(self.chain().kinds)
        for kind in self.kinds:
            if kind not in known:
                raise InputError(f"kinds: {kind!r}; allowed for {self.model.name!r}: {', '.join(known)}")

    def chain(self) -> Workload:
        """The chain of layers that was measured."""
        return chain(self.model, self.micro_batch_size, self.sequence_length, self.recompute)

    def times(self, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds a micro-batch, both [L], of a workload's layers on this device, by the formula
        of this module. Raises InputError for a layer of a kind that the profile lacks."""
        profiled = self.chain()
        forward, backward = np.empty(workload.layers), np.empty(workload.layers)
        kinds = np.array(workload.kinds)
        for kind in dict.fromkeys(workload.kinds):
            if kind not in self.kinds:
                raise InputError(f"profile of {self.model.name!r} on {self.device!r}: no times for kind {kind!r} of "
                                 f"{workload.name!r}; allowed: {', '.join(self.kinds)}")
            of_kind, first = kinds == kind, profiled.kinds.index(kind)
            for times, measured, here, there in zip((forward, backward), (
                    self.kinds[kind].forward_s, self.kinds[kind].backward_s), _work(workload), _work(profiled)):
                times[of_kind] = measured * (here[of_kind] / there[first])
        return forward, backward

    def to_json(self) -> str:
        """The text of a profile file."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_file(cls, path) -> "Profile":
        """Read a profile file. Raises InputError: one line with file, field, value and what is allowed."""
        entry = read_json(path, _ProfileFile)
        fields = {name: getattr(entry, name) for name in _ProfileFile.model_fields if name != "format"}
        fields["model"] = Model(**entry.model.model_dump())
        fields["kinds"] = {kind: KindTimes(**times.model_dump()) for kind, times in entry.kinds.items()}
        try:
            return cls(**fields)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _work(workload):
    """[2, L] what the times of both passes are proportional to."""
    flops = np.stack([workload.forward_flops, workload.backward_flops])
    moved = np.stack([workload.output_bytes, workload.output_bytes + workload.gradient_bytes])
    return np.where(np.array(workload.kinds) == "embedding", moved, flops)


FORMAT = "nnpiper-profile-1"
_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]  # the limit keeps FLOPs within floating point
_Seconds = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]


class _ProfiledModel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: _Text
    family: Literal["gpt", "bert", "llama", "t5"]
    layers: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    feed_forward: _Count
    vocabulary: _Count
    positions: Annotated[int, Field(strict=True, ge=0, le=1 << 24)]
    sequence_length: _Count
    tied: bool
    source: _Text


class _KindEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    forward_s: _Seconds
    backward_s: _Seconds
    forward_spread_s: _Seconds
    backward_spread_s: _Seconds


class _ProfileFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal[FORMAT]
    device: _Text
    memory_bytes: Annotated[float, Field(strict=True, gt=0, le=1e18, allow_inf_nan=False)] | None
    model: _ProfiledModel
    micro_batch_size: _Count
    sequence_length: _Count
    recompute: Annotated[bool, Field(strict=True)]
    dtype: Literal[DTYPES]
    kinds: Annotated[dict[Literal[KINDS], _KindEntry], Field(min_length=1)]
    runs: _Count
    processor: _Text
    torch_version: _Text
    date: _Text
