"""The JSON files of Metis, Piper and Sailor, as far as they are read; the fields bear the files' own names and units.

Fields that are not read are let pass.
"""

from typing import Annotated

from pydantic import BaseModel, Field, RootModel

from .cluster import MAX_DEVICES

MAX_BYTES = 1e18
MAX_SECONDS = 1e6
MAX_LAYERS = 10_000
MEBI, GIBI = 1 << 20, 1 << 30  # Metis's MB and GB, in bytes

_Bytes = Annotated[float, Field(strict=True, ge=0, le=MAX_BYTES)]
_Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS)]
_Milliseconds = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS * 1e3)]
_Rate = Annotated[float, Field(strict=True, gt=0, le=MAX_BYTES)]
_Count = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)]
_Index = Annotated[int, Field(strict=True)]
_Peak = tuple[list[float], _Rate]  # coefficients of a fit over message sizes, and the peak


class _PiperCost(BaseModel):
    id: str
    timePerSample: _Seconds
    parameterSize: _Bytes
    memoryUsageA: _Bytes
    memoryUsageB: _Bytes


class _PiperNode(BaseModel):
    id: _Index
    name: str = ""
    TMPCs: dict[str, list[_PiperCost]]


class _PiperEdge(BaseModel):
    sourceId: _Index
    destId: _Index
    communicationCost: _Bytes


class PiperFile(BaseModel):
    """A workload."""

    maxMemoryPerDevice: _Bytes
    maxDevices: _Count
    bandwidth: _Rate
    nodes: list[_PiperNode]
    edges: list[_PiperEdge]


class _MetisParameters(BaseModel):
    parameters_per_layer_bytes: list[_Bytes]
    activation_parameters_bytes: list[_Bytes] | None = None


class _MetisModel(BaseModel):
    parameters: _MetisParameters


class _MetisTime(BaseModel):
    layer_compute_total_ms: Annotated[list[_Milliseconds], Field(min_length=1, max_length=MAX_LAYERS)]


class _MetisMemory(BaseModel):
    layer_memory_total_mb: list[Annotated[float, Field(strict=True, ge=0, le=MAX_BYTES / MEBI)]]


class MetisFile(BaseModel):
    """DeviceType.X_tpN_bsM.json."""

    model: _MetisModel
    execution_time: _MetisTime
    execution_memory: _MetisMemory


class _MetisHost(BaseModel):
    instance_type: str
    inter_bandwidth: _Rate
    intra_bandwidth: _Rate
    memory: Annotated[float, Field(strict=True, ge=0, le=MAX_BYTES / GIBI)]


class MetisCluster(RootModel[dict[str, _MetisHost]]):
    """The cluster file: {IP: host}."""


class _SailorLayer(BaseModel):
    params_bytes: _Bytes
    act_output_bytes: _Bytes
    act_mem_bytes: _Bytes


class SailorInfo(RootModel[dict[str, dict[str, dict[str, _SailorLayer]]]]):
    """llm_info.json: {model: {tensor-parallel degree: {layer: bytes for one sequence}}}."""


class SailorProfile(RootModel[dict[str, dict[str, dict[str, tuple[_Seconds, _Seconds, _Seconds]]]]]):
    """{micro-batch size: {tensor-parallel degree: {layer: [forward, backward, update]}}}."""


class SailorWithin(RootModel[dict[str, dict[str, _Peak]]]):
    """intra_node_bandwidths.json: {type: {devices: [coefficients, peak]}}."""


class SailorBetween(RootModel[dict[str, dict[str, dict[str, dict[str, dict[str, dict[str, _Peak]]]]]]]):
    """Bandwidths between nodes: {zone: {type: {devices: {zone: {type: {devices: [coefficients, peak]}}}}}}."""
