"""Measuring: the real layers of a model in torch, and the time that their passes take on the local device.

Symbols: b micro-batch size, s sequence length, h hidden size, a attention heads, g = h kv_heads / a the width of keys
and values, f feed-forward width, V vocabulary, as in workload.py. Each kind of layer is built from the model's
hyperparameters with the parameters and matrix products that workload.py counts, so that a profile and a chain speak of
the same layers. GPT normalises before, BERT after each half of a block; both and T5 train with dropout 0.1. Attention
is scaled_dot_product_attention, whose kernel torch chooses. The head includes the loss, in 32 bit.

One layer of a kind is on the device at a time. Gradients of weights accumulate from pass to pass, as they do over the
micro-batches of a step. Weights and activations are 16 bit on CUDA and 32 bit on a CPU, where torch is slow in 16 bit.
Two things are not measured: the relative positions' table that a T5 half's first block holds (its bias is an input
here, with its gradient), and the closing norm that T5's second embedding layer holds.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import provenance
from .problem import InputError
from .profiles import KindTimes, Profile
from .workload import MODELS, Model, chain, check_count, find

DROPOUT = 0.1  # Radford et al. 2019, Devlin et al. 2019, Raffel et al. 2020
WARM_UP, REPEATS = 3, 20
MAX_RUNS = 10_000
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")  # in the messages of CUDA and of CPU allocators


class Attention(nn.Module):
    """Attention of a heads over kv_heads keys and values; queries [b, s, h] from x, keys and values from `memory`."""

    def __init__(self, m: Model, causal: bool):
        super().__init__()
        g, bias = m.hidden * m.kv_heads // m.heads, m.family in ("gpt", "bert")
        self.query, self.output = (nn.Linear(m.hidden, m.hidden, bias=bias) for _ in range(2))
        self.key, self.value = (nn.Linear(m.hidden, g, bias=bias) for _ in range(2))
        self.family, self.width, self.causal, self.grouped = m.family, m.hidden // m.heads, causal, g < m.hidden

    def forward(self, x, memory, bias=None):
        query, key, value = (layer(source).unflatten(-1, (-1, self.width)).transpose(1, 2)  # [b, heads, s, width]
                             for layer, source in ((self.query, x), (self.key, memory), (self.value, memory)))
        if self.family == "llama":
            query, key = rotate(query), rotate(key)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=0.0 if self.family == "llama" else DROPOUT,
            is_causal=self.causal and bias is None, scale=1.0 if self.family == "t5" else None, enable_gqa=self.grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, "RoFormer", equation 34) of queries or keys [b, heads, s, width]."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device), rate)  # [s, width / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, m: Model):
        super().__init__()
        bias = m.family in ("gpt", "bert")
        self.up, self.down = nn.Linear(m.hidden, m.feed_forward, bias), nn.Linear(m.feed_forward, m.hidden, bias)
        self.gate = nn.Linear(m.hidden, m.feed_forward, bias) if m.family == "llama" else None
        self.activation = F.relu if m.family == "t5" else F.gelu

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gate else self.activation(self.up(x)))


class Block(nn.Module):
    """Self attention, cross attention where `cross`, feed-forward; [b, s, h] to [b, s, h]."""

    def __init__(self, m: Model, causal: bool, cross: bool = False):
        super().__init__()
        self.attention = Attention(m, causal)
        self.cross = Attention(m, causal=False) if cross else None
        self.feed_forward = FeedForward(m)
        self.norms = nn.ModuleList(norm_layer(m) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(0.0 if m.family == "llama" else DROPOUT)
        self.norm_after = m.family == "bert"

    def forward(self, x, bias=None, encoded=None):
        """bias: T5's relative positions [1, a, s, s]; encoded: the encoder's output [b, s, h]"""
        parts = [lambda y: self.attention(y, y, bias), self.feed_forward]
        if self.cross:
            parts.insert(1, lambda y: self.cross(y, encoded))
        for part, norm in zip(parts, self.norms):
            x = norm(x + self.dropout(part(x))) if self.norm_after else x + self.dropout(part(norm(x)))
        return x


class Embedding(nn.Module):
    """Token numbers [b, s] to [b, s, h]."""

    def __init__(self, m: Model):
        super().__init__()
        self.token = nn.Embedding(m.vocabulary, m.hidden)
        self.position = nn.Embedding(m.positions, m.hidden) if m.positions else None
        self.segment, self.norm = (nn.Embedding(2, m.hidden), norm_layer(m)) if m.family == "bert" else (None, None)
        self.dropout = nn.Dropout(0.0 if m.family == "llama" else DROPOUT)

    def forward(self, tokens):
        x = self.token(tokens)
        if self.position:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        if self.segment:
            x = self.norm(x + self.segment(torch.zeros_like(tokens)))
        return self.dropout(x)


class Head(nn.Module):
    """Final norm, projection and mean loss over the tokens; BERT's with the loss of the next sentence beside."""

    def __init__(self, m: Model):
        super().__init__()
        self.norm, self.projection = norm_layer(m), nn.Linear(m.hidden, m.vocabulary, bias=m.family == "bert")
        self.dense, self.pooler, self.next_sentence = (
            (nn.Linear(m.hidden, m.hidden), nn.Linear(m.hidden, m.hidden), nn.Linear(m.hidden, 2))
            if m.family == "bert" else (None, None, None))

    def forward(self, x, targets):
        y = self.norm(F.gelu(self.dense(x)) if self.dense else x)
        loss = F.cross_entropy(self.projection(y).float().flatten(0, 1), targets.flatten())
        if self.pooler:
            pooled = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
            loss = loss + F.cross_entropy(pooled.float(), torch.zeros_like(targets[:, 0]))
        return loss


def norm_layer(m: Model) -> nn.Module:
    return nn.LayerNorm(m.hidden) if m.family in ("gpt", "bert") else nn.RMSNorm(m.hidden, eps=1e-6)


def layer(m: Model, kind: str) -> nn.Module:
    """The torch module of one layer of a kind, with the parameters that workload.py counts."""
    if kind == "embedding":
        return Embedding(m)
    if kind == "head":
        return Head(m)
    return Block(m, causal=m.family in ("gpt", "llama") or kind == "decoder", cross=kind == "decoder")


def inputs(m: Model, kind: str, b: int, s: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a layer of a kind reads; those with a gradient say so."""
    def normal(*shape):
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    tokens = torch.randint(m.vocabulary, (b, s), device=device)
    if kind == "embedding":
        return [tokens]
    read = [normal(b, s, m.hidden)]
    if kind == "head":
        read.append(tokens)
    if kind in ("encoder", "decoder"):
        bias = torch.randn((1, m.heads, s, s), device=device, dtype=dtype)
        if kind == "decoder":
            bias.masked_fill_(torch.ones((s, s), dtype=torch.bool, device=device).triu(1), -torch.inf)
        read.append(bias.requires_grad_())
    if kind == "decoder":
        read.append(normal(b, s, m.hidden))
    return read


def measure(model: str | Model, micro_batch_size: int = 1, sequence_length: int | None = None, recompute: bool = False,
            device: str = "cpu", warm_up: int = WARM_UP, repeats: int = REPEATS,
            progress: Callable[[str], None] | None = None) -> Profile:
    """Measure forward and backward of every kind of layer of a model, or of the name of one in MODELS.

    device: "cpu", "cuda" or "cuda:N"; warm_up passes are not counted, `repeats` are. progress is called with each kind
    before it is measured. With recompute, blocks keep their input alone, and their backward pass repeats the forward.
    Raises InputError, also where memory runs out.
    """
    model = model if isinstance(model, Model) else find(MODELS, "model", model)
    work = chain(model, micro_batch_size, sequence_length, recompute)
    s = model.sequence_length if sequence_length is None else sequence_length
    check_count("warm_up", warm_up, MAX_RUNS)
    check_count("repeats", repeats, MAX_RUNS)
    step = model.heads * (2 if model.family == "llama" else 1)  # rotary positions turn pairs
    if model.hidden % step or model.heads % model.kv_heads:
        raise InputError(f"model: {model.name!r}: hidden {model.hidden}, heads {model.heads}, kv_heads {model.kv_heads}"
                         f"; allowed: a multiple of {step} and heads a multiple of kv_heads")
    place = _device(device)
    on_gpu = place.type == "cuda"
    dtype = torch.float32 if not on_gpu else (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16)
    kinds = {}
    with torch.random.fork_rng([place] if on_gpu else []):  # the values of weights and inputs do not matter
        for kind in dict.fromkeys(work.kinds):
            if progress:
                progress(kind)
            with _memory_errors(device, model, kind, micro_batch_size, s, recompute):
                kinds[kind] = _measure_kind(model, kind, micro_batch_size, s, recompute, place, dtype, warm_up, repeats)
            if on_gpu:
                torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(place) if on_gpu else provenance.environment()["processor"]
    return Profile(
        device=name, memory_bytes=float(torch.cuda.get_device_properties(place).total_memory) if on_gpu else None,
        model=model, micro_batch_size=micro_batch_size, sequence_length=s, recompute=recompute,
        dtype=str(dtype).removeprefix("torch."), kinds=kinds, runs=repeats,
        processor=name if on_gpu else f"{name}, torch threads: {torch.get_num_threads()}",
        torch_version=torch.__version__, date=datetime.now(UTC).date().isoformat())


def _measure_kind(model, kind, b, s, recompute, device, dtype, warm_up, repeats):
    with torch.device("meta"):  # no time and memory for 32-bit weights that would be thrown away
        module = layer(model, kind)
    module = module.to(dtype).to_empty(device=device)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    read = inputs(model, kind, b, s, device, dtype)
    recompute = recompute and kind not in ("embedding", "head")
    seconds = np.array([_one_run(module, read, recompute, device) for _ in range(warm_up + repeats)][warm_up:])
    low, middle, high = np.percentile(seconds, (25, 50, 75), axis=0)
    return KindTimes(*map(float, (*middle, *(high - low))))


def _one_run(module, read, recompute, device):
    """(forward, backward) seconds of one micro-batch."""
    for tensor in read:
        tensor.grad = None
    marks = [_mark(device)]
    out = checkpoint(module, *read, use_reentrant=False) if recompute else module(*read)
    marks.append(_mark(device))
    # the gradient that arrives: that of a loss is 1; for an activation any values will do
    out.backward() if out.dim() == 0 else out.backward(out.detach())
    marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return [left.elapsed_time(right) * 1e-3 for left, right in zip(marks, marks[1:])]
    return [right - left for left, right in zip(marks, marks[1:])]


def _mark(device):
    """A point in time of the device: on CUDA, when the work enqueued so far is done."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _device(name):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu"] + ["cuda"] * (count > 0) + [f"cuda:{i}" for i in range(count)]
    if name not in allowed:
        raise InputError(f"device: {name!r}; allowed here: {', '.join(allowed)}")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@contextmanager
def _memory_errors(device, model, kind, b, s, recompute):
    """Turn the errors that torch raises where memory runs out into an InputError that says what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in NO_MEMORY):
            raise
        hints = [f"a micro-batch below {b}"] * (b > 1) + [f"a sequence below {s}"] * (s > 1)
        hints += ["recomputation"] * (not recompute and kind not in ("embedding", "head")) + ["a smaller model"]
        raise InputError(f"device: {device!r}: too little memory for a layer of kind {kind!r} of {model.name!r} with "
                         f"micro-batch size {b} and sequence length {s}; allowed: what fits, such as "
                         f"{' or '.join(hints)}") from None
