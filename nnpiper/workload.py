"""Workloads: transformer models as chains of layers, with the FLOPs and bytes of every layer by published formulas.

Symbols: b micro-batch size (sequences), s sequence length, h hidden size, a attention heads, g = h kv_heads / a the
width of keys and values, f feed-forward width, V vocabulary. Numbers are for one micro-batch, activations are 16 bit.

FLOPs count matrix products alone, two per multiply-add, and the whole score matrix, also under a causal mask, as
Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix) do:
a GPT block is 24 b s h^2 + 4 b s^2 h, the head 2 b s h V, the backward pass twice the forward pass. So the embedding,
a look-up, counts as 0 FLOPs.

Kept activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models",
section 4) without tensor parallelism: a GPT block keeps s b h (34 + 5 a s / h) bytes, the head 4 s b h (1 + V / h) with
its 32-bit logits. With recomputation a block keeps its input alone, 2 s b h, and its backward pass costs one more
forward pass; what it keeps for the moment while it recomputes is not counted. Embedding and head do not recompute.

A parameter costs 16 bytes: 16-bit weight and gradient, 32-bit weight, momentum and variance of Adam (2 + 2 + 12,
Rajbhandari et al. 2020, "ZeRO", section 3.1). Replicas all-reduce the 16-bit gradient.

Where the publication ties weights, `Model.parameters` counts them once, but in the chain every embedding and the head
hold a copy of their own: that is exact where they lie on different stages, which is the rule in a pipeline, and an
upper bound where they share one. The sum over the two copies' gradients, once a step, is not counted.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from .paths import DATA
from .problem import InputError, read_json

ADAM_BYTES = 16  # per parameter, see above
GRADIENT_BYTES = 2  # per parameter
MAX_SEQUENCE_LENGTH = 1 << 20
MAX_MICRO_BATCH_SIZE = 1 << 16


@dataclass(frozen=True)
class Model:
    """Hyperparameters of a transformer.

    family: "gpt" and "bert" (biases, layer norm, dropout), "llama" (gated MLP, no biases, no dropout, attention scores
        not kept), "t5" (encoder, then decoder with cross attention, no biases, dropout)
    layers: blocks; of each half for "t5"
    sequence_length: what the publication trains with, the default of `chain`
    positions: learned position vectors, 0 where positions are rotary or relative
    source: publication of these numbers
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    positions: int
    sequence_length: int
    tied: bool
    source: str

    @property
    def parameters(self) -> int:
        """Parameters as publications count them: tied weights once."""
        copies = (2 if self.family == "t5" else 1) if self.tied else 0
        return int(chain(self).parameters.sum()) - copies * self.vocabulary * self.hidden


@dataclass(frozen=True, eq=False)
class Workload:
    """A chain of L layers and what one micro-batch of it costs; arrays are read-only.

    layer_names: L strings; kinds: L of "embedding", "block", "encoder", "decoder", "head"
    forward_flops, backward_flops, parameters: [L]
    output_bytes: [L] activation sent on, 0 for the last layer
    stash_bytes: [L] activation kept from forward to backward
    static_bytes: [L] weights, gradients, optimizer state
    gradient_bytes: [L] what replicas all-reduce once a step
    """

    name: str
    layer_names: tuple[str, ...]
    kinds: tuple[str, ...]
    forward_flops: np.ndarray
    backward_flops: np.ndarray
    parameters: np.ndarray
    output_bytes: np.ndarray
    stash_bytes: np.ndarray
    static_bytes: np.ndarray
    gradient_bytes: np.ndarray

    @property
    def layers(self) -> int:
        return len(self.layer_names)


def chain(model: str | Model, micro_batch_size: int = 1, sequence_length: int | None = None,
          recompute: bool = False) -> Workload:
    """The chain of layers of a model, or of the name of one in MODELS. Raises InputError.

    >>> chain("gpt2").layer_names[:2], chain("gpt2").layers
    (('embedding', 'block 0'), 14)
    """
    model = model if isinstance(model, Model) else find(MODELS, "model", model)
    s = model.sequence_length if sequence_length is None else sequence_length
    check_count("micro_batch_size", micro_batch_size, MAX_MICRO_BATCH_SIZE)
    check_count("sequence_length", s, model.positions or MAX_SEQUENCE_LENGTH)
    tokens = micro_batch_size * s
    rows = [("embedding", "embedding", _embedding(model, tokens))]
    if model.family == "t5":
        rows += [(f"encoder {i}", "encoder", _block(model, tokens, s, recompute, first=i == 0))
                 for i in range(model.layers)]
        rows += [("decoder embedding", "embedding", _embedding(model, tokens, after_encoder=True))]
        rows += [(f"decoder {i}", "decoder", _block(model, tokens, s, recompute, first=i == 0, cross=True,
                                                    sent=1 if i == model.layers - 1 else 2))
                 for i in range(model.layers)]
    else:
        rows += [(f"block {i}", "block", _block(model, tokens, s, recompute)) for i in range(model.layers)]
    rows += [("head", "head", _head(model, tokens))]
    names, kinds, costs = zip(*rows)
    forward, backward, parameters, output, stash = np.array(costs, np.float64).T
    return Workload(model.name, names, kinds, *map(_frozen, (
        forward, backward, parameters, output, stash, ADAM_BYTES * parameters, GRADIENT_BYTES * parameters)))


def find(table: dict, field: str, name: str):
    """table[name]. Raises InputError with the nearest known name."""
    if name not in table:
        near = difflib.get_close_matches(str(name).lower(), table, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(f"{field}: {name!r}{hint}; allowed: {', '.join(table)}")
    return table[name]


def check_count(field: str, value, limit: int) -> None:
    """Raise InputError unless value is an integer from 1 to limit."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= limit:
        raise InputError(f"{field}: {value!r}; allowed: an integer from 1 to {limit}")


# The functions below return one layer's (forward FLOPs, backward FLOPs, parameters, output bytes, stash bytes).
# `tokens` is b s; `sent` counts the activations [b, s, h] that go to the next layer.


def _embedding(m, tokens, after_encoder=False):
    """After an encoder: its closing norm, the target's embedding, and the encoder's output is sent along."""
    parameters = (m.vocabulary + m.positions) * m.hidden
    if m.family == "bert":
        parameters += 4 * m.hidden  # two segment vectors and a layer norm
    if after_encoder:
        parameters += m.hidden
    stash = 0 if m.family == "llama" else tokens * m.hidden  # the dropout mask
    return 0, 0, parameters, 2 * tokens * m.hidden * (2 if after_encoder else 1), stash


def _block(m, tokens, s, recompute, first=False, cross=False, sent=1):
    """Self attention, cross attention where `cross`, and MLP, each with its norm.

    A block with cross attention sends the encoder's output on beside its own, and each such block is counted to keep
    that output: an upper bound, since blocks on one device share it. `first` of a T5 half holds the position table.
    """
    h, g, f = m.hidden, m.hidden * m.kv_heads // m.heads, m.feed_forward
    attentions = 2 if cross else 1
    norms = attentions + 1
    matrices = 3 if m.family == "llama" else 2
    forward = tokens * (attentions * (4 * h * h + 4 * h * g + 4 * s * h) + matrices * 2 * h * f)

    parameters = attentions * (2 * h * h + 2 * h * g) + matrices * h * f + norms * h
    if m.family in ("gpt", "bert"):
        parameters += (2 * h + 2 * g) + (f + h) + norms * h  # biases of attention, MLP, norms
    if m.family == "t5" and first:
        parameters += 32 * m.heads  # 32 buckets of relative positions

    # bytes a token: attention keeps its input, queries, projection input (2 h each), keys and values (2 g each)
    stash = attentions * (6 * h + 4 * g) + norms * 2 * h
    if cross:
        stash += 2 * h  # the encoder's output
    if m.family == "llama":
        # input, gate, activated gate, up, product; scores are not kept (Touvron et al. 2023, "LLaMA", section 2.4)
        stash += 2 * h + 8 * f
    else:
        # dropout mask h; softmax, its mask and their product, 5 a s; MLP: input, both sides of the activation, mask
        stash += attentions * (h + 5 * m.heads * s) + 2 * h + 4 * f + h
    backward = 2 * forward
    if recompute:
        stash, backward = 2 * h * (2 if cross else 1), 3 * forward
    return forward, backward, parameters, 2 * tokens * h * sent, tokens * stash


def _head(m, tokens):
    """Final norm, projection to the vocabulary and loss; BERT has a dense layer, norm and bias before, and the pooler
    and next-sentence layer beside, whose single token is not counted as work."""
    h, V = m.hidden, m.vocabulary
    forward, parameters, stash = 2 * tokens * h * V, V * h, tokens * (4 * h + 4 * V)
    if m.family == "bert":
        forward += 2 * tokens * h * h
        parameters += h * h + 3 * h + V + h * h + h + 2 * h + 2
        stash += tokens * 4 * h
    else:
        parameters += 2 * h if m.family == "gpt" else h
    return forward, 2 * forward, parameters, 0, stash


def _frozen(array):
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


_Count = Annotated[int, Field(strict=True, gt=0)]


class _ModelEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    family: Literal["gpt", "bert", "llama", "t5"]
    layers: _Count
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    feed_forward: _Count
    vocabulary: _Count
    positions: Annotated[int, Field(strict=True, ge=0)]
    sequence_length: _Count
    tied: bool
    source: Annotated[str, Field(min_length=1)]


class _ModelFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    models: dict[str, _ModelEntry]


_models = read_json(DATA / "models.json", _ModelFile).models
MODELS: dict[str, Model] = {name: Model(name=name, **entry.model_dump()) for name, entry in _models.items()}
