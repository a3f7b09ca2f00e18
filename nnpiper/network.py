"""The NNPiper network: computation costs, communication costs, S and M in; a distribution over strategies out.

Two parts share one encoding of the devices. The *pointer* builds the groups stage by stage: at each step it picks a
device that opens the next stage or joins the open one, or stops and leaves the rest unused. The *divider* reads the
chosen stages and says which share of the work each gets, as a correction of its share of the speed; shares become
cuts at layer boundaries (`search.cuts_by_share`). All costs enter as ratios to the balanced stage time, so the scale
does not matter, and one set of weights serves any L, K, S and M. The network knows the problem's arrays and no planner.

Symbols: A batch of problems (equal K and S), N strategies drawn for each, T = K steps, K devices, S stages, D width.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from . import sampling
from .batch import Batch
from .problem import InputError
from .schedule import in_flight
from .search import layer_work

GLOBAL_FEATURES, DEVICE_FEATURES, PAIR_FEATURES, STATE_FEATURES, STAGE_FEATURES = 16, 9, 8, 9, 16
CHANNELS = 8  # of what a link says to the pointer
POINTER_CLIP = 10.0  # logits are CLIP tanh(x), Bello et al. 2017
SIGMA_RANGE = 0.02, 0.5  # of the log share


@dataclass(frozen=True)
class Size:
    """Width, heads and depth of the two parts."""

    width: int = 96
    heads: int = 6
    depth: int = 3
    stage_width: int = 64
    stage_heads: int = 4
    stage_depth: int = 2


class Features(NamedTuple):
    """What the network reads, for A problems with equal K and S; float32."""

    globals: Tensor  # [A, GLOBAL_FEATURES]
    devices: Tensor  # [A, K, DEVICE_FEATURES]
    pairs: Tensor  # [A, K, K, PAIR_FEATURES]
    speed: Tensor  # [A, K] share of the summed speed
    rank: Tensor  # [A, K] place by falling speed
    link: Tensor  # [A, K, K] time of a whole transfer / balanced stage time
    link_reduce: Tensor  # [A, K, K] time of moving all gradients / (M x balanced stage time)
    capacity: Tensor  # [A, K, 2] device memory / static bytes of the model, / stash bytes of the model
    in_flight: Tensor  # [A, S]
    stages: int


class Encoding(NamedTuple):
    """The devices as the pointer needs them, once per problem."""

    nodes: Tensor  # [A, K, D]
    last: Tensor  # [A, K + 1, D] by the device picked last; row K: none yet
    group: Tensor  # [A, K, D] summed over the open group
    free: Tensor  # [A, K, D] averaged over the free devices
    whole: Tensor  # [A, 1, D]
    keys: Tensor  # [A, 2 K, D] open with k, join k
    links: Tensor  # [A, K, K x 2 C] from a device of the open group to each action's device


class State(NamedTuple):
    """A partial strategy (N of them for each problem)."""

    used: Tensor  # [A, N, K] bool
    group: Tensor  # [A, N, K] float, 1 for the open group's devices
    last: Tensor  # [A, N] device picked last, K: none yet
    opened: Tensor  # [A, N] stages opened

    def mask(self, rank: Tensor, S: int) -> Tensor:
        """[A, N, 2 K + 1] bool, which actions are allowed: open the next stage with k, let k join the open one, stop.
        Joining goes by falling speed, so that each group can be built in one way only; a device may join only
        while enough are left for the stages to come."""
        K = self.used.shape[-1]
        free = ~self.used
        left = free.sum(-1, keepdim=True)  # [A, N, 1]
        to_open = S - self.opened[..., None]
        order = torch.cat([rank, rank.new_full((len(rank), 1), -1.0)], 1)
        slower = rank[:, None] > order.gather(1, self.last)[..., None]
        opens = free & (to_open > 0)
        joins = free & slower & (to_open < S) & (left > to_open)
        return torch.cat([opens, joins, to_open == 0], -1)


class Groupings(NamedTuple):
    """N groupings drawn for each of A problems, with what is needed to score them again."""

    actions: Tensor  # [A, N, T]
    states: State  # [A, N x T, ...] before each action
    member: Tensor  # [A, N, S, K] float, 1 where the device is in the stage


def join(one: Groupings, other: Groupings) -> Groupings:
    """The groupings of both, for the same problems."""
    A = len(one.actions)
    stack = lambda a, b: torch.cat([a, b], 1)
    states = (stack(a.view(A, -1, *a.shape[2:]), b) for a, b in zip(one.states, other.states))
    return Groupings(stack(one.actions, other.actions), State(*states), stack(one.member, other.member))


class Divisions(NamedTuple):
    """How the layers of A x N groupings are to be divided: a normal distribution of each stage's log share."""

    mean: Tensor  # [A, N, S]
    sigma: Tensor  # [A, N, S]

    @torch.no_grad()
    def draw(self, R: int, generator: torch.Generator, greedy: bool = False) -> Tensor:
        """[A, N, R, S] log shares, before normalisation; with greedy, number 0 of each grouping is the likeliest."""
        noise = torch.empty(*self.mean.shape[:2], R, self.mean.shape[2]).normal_(generator=generator)
        if greedy:
            noise[:, :, 0] = 0.0
        return self.mean[:, :, None] + self.sigma[:, :, None] * noise

    @torch.no_grad()
    def around(self, share: np.ndarray, R: int, generator: torch.Generator) -> Tensor:
        """[A, 1, R, S] log shares for the last grouping: number 0 divides as `share` [A, S] does, the others are
        drawn."""
        last = Divisions(self.mean[:, -1:], self.sigma[:, -1:])
        drawn = last.draw(R, generator)
        given = torch.from_numpy(np.log(np.maximum(share, 1e-9))).float()
        weight = last.sigma[:, 0] ** -2
        shift = ((last.mean[:, 0] - given) * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        drawn[:, 0, 0] = given + shift  # only differences count, so take the likeliest of these
        return drawn

    def log_prob(self, log_share: Tensor) -> Tensor:
        """[A, N, R] log density of drawn shares, with gradient."""
        deviation = (log_share - self.mean[:, :, None]) / self.sigma[:, :, None]
        density = -0.5 * deviation.square() - self.sigma.log()[:, :, None] - 0.5 * math.log(2 * math.pi)
        return density.sum(-1)


class Network(nn.Module):
    """See the module. `size` is kept for the checkpoint; `blind`, one of BLIND or "", hides a part of the input."""

    def __init__(self, size: Size = Size(), blind: str = ""):
        super().__init__()
        if blind and blind not in BLIND:
            raise InputError(f"blind: {blind!r}; allowed: nothing, {', '.join(BLIND)}")
        self.size, self.blind = size, blind
        D, H, C = size.width, size.heads, CHANNELS
        self.device_in = nn.Linear(DEVICE_FEATURES + GLOBAL_FEATURES, D)
        self.pair_in = nn.Sequential(nn.Linear(PAIR_FEATURES, 32), nn.GELU(), nn.Linear(32, H * size.depth + 2 * C))
        self.encoder = nn.ModuleList(Block(D, H) for _ in range(size.depth))
        self.node_norm = nn.LayerNorm(D)
        self.to_parts = nn.Linear(D, 5 * D, bias=False)  # last, group, free, open key, join key
        self.to_whole = nn.Linear(D, D)
        self.nothing_yet = nn.Parameter(torch.zeros(D))
        self.state_in = nn.Linear(STATE_FEATURES, D)
        self.query = nn.Sequential(nn.GELU(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D + 2 * C + 1))
        self.divider = Divider(size)

    def features(self, problems: Batch) -> Features:
        """What this network reads of A problems with equal K, S, schedule and transfers."""
        if self.blind:
            seen = features(BLIND[self.blind](problems))
            if self.blind != "stages":
                return seen
            # decoding always knows how many stages it has to fill, and the divider which ones it divides for
            return seen._replace(stages=problems.stages, in_flight=features(problems).in_flight)
        return features(problems)

    def encode(self, f: Features) -> Encoding:
        A, K = f.speed.shape
        x = self.device_in(torch.cat([f.devices, f.globals[:, None].expand(A, K, -1)], -1))
        pairs = self.pair_in(f.pairs)  # [A, K, K, H x depth + 2 C]
        bias = pairs[..., :-2 * CHANNELS].permute(0, 3, 1, 2).chunk(self.size.depth, 1)  # depth x [A, H, K, K]
        for block, b in zip(self.encoder, bias):
            x = block(x, b)
        x = self.node_norm(x)
        last, group, free, opens, joins = self.to_parts(x).chunk(5, -1)
        last = torch.cat([last, self.nothing_yet.expand(A, 1, -1)], 1)
        return Encoding(x, last, group, free, self.to_whole(x.mean(1, keepdim=True)), torch.cat([opens, joins], 1),
                        pairs[..., -2 * CHANNELS:].reshape(A, K, -1))

    def logits(self, f: Features, e: Encoding, state: State) -> Tensor:
        """[A, N, 2 K + 1] masked logits of the actions from N states a problem."""
        A, N, K = state.used.shape
        C = CHANNELS
        free = (~state.used).float()
        context = e.whole + e.last.gather(1, state.last[..., None].expand(-1, -1, e.last.shape[-1]))
        context = context + torch.baddbmm(state.group @ e.group, free / free.sum(-1, keepdim=True).clamp(min=1), e.free)
        context = context + self.state_in(self._state_features(f, state, free))
        q, w, stop = self.query(context).split([self.size.width, 2 * C, 1], -1)
        logits = (q @ e.keys.transpose(1, 2)) / math.sqrt(self.size.width)  # [A, N, 2 K]
        mean = state.group / state.group.sum(-1, keepdim=True).clamp(min=1)
        links = (mean @ e.links).view(A, N, K, 2, C)
        logits = logits + torch.einsum("ankvc,anvc->anvk", links, w.view(A, N, 2, C)).reshape(A, N, 2 * K)
        logits = POINTER_CLIP * torch.tanh(torch.cat([logits, stop], -1) / POINTER_CLIP)
        return logits.masked_fill(~state.mask(f.rank, f.stages), -torch.inf)

    def _state_features(self, f, state, free):
        K, S = f.speed.shape[1], f.stages
        to_open = (S - state.opened).float()
        left = free.sum(-1)
        free_speed = (free * f.speed[:, None]).sum(-1)
        group_speed = (state.group * f.speed[:, None]).sum(-1)
        fair = free_speed / to_open.clamp(min=1)
        return torch.stack([to_open / S, left / K, free_speed, group_speed * S, (group_speed * S).clamp(min=0.01).log(),
                            state.group.sum(-1) / K, to_open / left.clamp(min=1), fair * S,
                            (to_open == 0).float()], -1)

    @torch.no_grad()
    def draw(self, f: Features, e: Encoding, N: int, generator: torch.Generator, greedy: bool = False) -> Groupings:
        """N groupings for each problem; with greedy, number 0 takes the likeliest action at each step."""
        A, K = f.speed.shape
        S, width = f.stages, self.size.width
        random = torch.randint(1, 2**62, (1,), generator=generator).numpy().astype(np.uint64)
        speed, rank, whole, last, group, free, links, weight, bias = (
            t.detach().contiguous().numpy() for t in (f.speed, f.rank, e.whole, e.last, e.group, e.free, e.links,
                                                      self.state_in.weight.T, self.state_in.bias))
        keys = e.keys.transpose(1, 2) / math.sqrt(width)
        state = sampling.initial(A, N, K)
        context, actions = torch.empty(A, N, width), np.empty((K, A, N), np.int64)
        states = State(*(torch.empty(A, N, K, *part.shape[2:], dtype=kind) for part, kind in
                         zip(state, (torch.bool, torch.float32, torch.long, torch.long))))
        for t in range(K):
            for kept, part in zip(states, state):
                kept[:, :, t] = torch.from_numpy(part)
            sampling.fill_context(state, S, speed, whole, last, group, free, weight, bias, context.numpy())
            q, extra = self.query(context).split([width, 2 * CHANNELS + 1], -1)
            sampling.pick(state, S, rank, (q @ keys).numpy(), extra.contiguous().numpy(), links, POINTER_CLIP, greedy,
                          random, actions[t])
        actions = torch.from_numpy(np.ascontiguousarray(actions.transpose(1, 2, 0)))
        return Groupings(actions, State(*(part.flatten(1, 2) for part in states)), _membership(actions, K, S))

    @torch.no_grad()
    def replay(self, f: Features, actions: np.ndarray) -> Groupings:
        """One given grouping for each problem, from actions [A, K], as `draw` returns groupings."""
        A, K = actions.shape
        state, states = sampling.initial(A, 1, K), []
        for t in range(K):
            states.append(tuple(part.copy() for part in state))
            sampling.apply(state, actions[:, t:t + 1])
        parts = (torch.from_numpy(np.stack(parts, 2)).flatten(1, 2) for parts in zip(*states))
        used, group, last, opened = parts
        actions = torch.from_numpy(actions)[:, None]
        return Groupings(actions, State(used, group.float(), last, opened), _membership(actions, K, f.stages))

    def log_prob(self, f: Features, e: Encoding, groupings: Groupings) -> Tensor:
        """[A, N] log probability of drawn groupings, with gradient."""
        logits = self.logits(f, e, groupings.states)
        picked = logits.log_softmax(-1).gather(-1, groupings.actions.flatten(1)[..., None])
        return picked.view(groupings.actions.shape).sum(-1)

    def divide(self, f: Features, e: Encoding, groupings: Groupings) -> Divisions:
        """How to divide the layers for each grouping, with gradient."""
        return self.divider(f, e, groupings.member)


class Divider(nn.Module):
    """Reads the chosen stages, gives mean and deviation of each stage's log share of the work."""

    def __init__(self, size: Size):
        super().__init__()
        D = size.stage_width
        self.stage_in = nn.Linear(STAGE_FEATURES, D)
        self.node_in = nn.Linear(size.width, D, bias=False)
        self.global_in = nn.Linear(GLOBAL_FEATURES, D)
        self.distance = nn.Embedding(2 * DISTANCES + 1, size.stage_heads * size.stage_depth)
        self.blocks = nn.ModuleList(Block(D, size.stage_heads) for _ in range(size.stage_depth))
        self.out = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2))
        nn.init.zeros_(self.out[1].weight)
        nn.init.zeros_(self.out[1].bias)

    def forward(self, f: Features, e: Encoding, member: Tensor) -> Divisions:
        """From member [A, N, S, K]."""
        A, N, S, K = member.shape
        speed = (member @ f.speed[:, None, :, None]).clamp(min=1e-6)  # [A, N, S, 1]
        # the shares' noisy gradient stays out of the encoder: it learns from the pointer
        nodes = (member * f.speed[:, None, None] / speed).flatten(1, 2) @ self.node_in(e.nodes.detach())
        x = self.stage_in(_stage_features(f, member, speed)) + nodes.view(A, N, S, -1)
        x = (x + self.global_in(f.globals)[:, None, None]).flatten(0, 1)  # [A N, S, D]
        step = torch.arange(S)
        distance = (step[None] - step[:, None]).clamp(-DISTANCES, DISTANCES) + DISTANCES
        bias = self.distance(distance).permute(2, 0, 1)[None].chunk(len(self.blocks), 1)
        for block, b in zip(self.blocks, bias):
            x = block(x, b)
        correction, deviation = self.out(x).view(A, N, S, 2).unbind(-1)
        low, high = SIGMA_RANGE
        sigma = low * (high / low) ** torch.sigmoid(deviation)
        return Divisions(speed[..., 0].log() + correction, sigma)


DISTANCES = 8  # stages further apart share one attention bias


class Block(nn.Module):
    """Pre-norm transformer block; `bias` [., H, n, n] is added to the attention logits."""

    def __init__(self, D: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        B, n, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(B, n, D))
        return x + self.mlp(self.norm2(x))


def _membership(actions, K, S):
    """[A, N, S, K] float from actions [A, N, T]."""
    A, N, _ = actions.shape
    stage = (actions < K).cumsum(-1) - 1  # stage that is open after the action
    picked = functional.one_hot(actions % K, K) * (actions < 2 * K)[..., None]  # [A, N, T, K]
    return (functional.one_hot(stage, S).transpose(-1, -2).float() @ picked.float())


def _stage_features(f, member, speed):
    """[A, N, S, STAGE_FEATURES]; `speed` [A, N, S, 1] is each stage's share of the speed."""
    A, N, S, K = member.shape
    part = member * f.speed[:, None, None] / speed  # a(k)
    size = member.sum(-1)
    position = torch.linspace(0, 1, S).expand(A, N, S) if S > 1 else torch.zeros(A, N, S)
    ahead, back = torch.zeros(2, A, N, S)
    if S > 1:
        left, right = part[:, :, :-1], part[:, :, 1:]
        for time, link in ((ahead, f.link), (back, f.link.transpose(1, 2))):
            # link[g, h]: the busiest sender g, the busiest receiver h
            sends = (left * (right.flatten(1, 2) @ link.transpose(1, 2)).view(left.shape)).amax(-1)
            receives = (right * (left.flatten(1, 2) @ link).view(right.shape)).amax(-1)
            time[..., :-1] = torch.maximum(sends, receives)
    before = torch.cat([torch.zeros(A, N, 1), ahead[..., :-1]], -1)
    back_before = torch.cat([torch.zeros(A, N, 1), back[..., :-1]], -1)
    # slowest link inside the group
    inside = torch.einsum("ansk,akj->ansj", member, f.link_reduce) * member / K
    reduce = 2 * (1 - 1 / size.clamp(min=1)) * speed[..., 0] * inside.amax(-1) * (size > 1)
    static, stash = f.capacity[:, None, None].unbind(-1)  # [A, 1, 1, K] in models
    flight = f.in_flight[:, None, :, None]
    room = 1 / (1 / static.clamp(min=1e-6) + flight * part / stash.clamp(min=1e-6))  # share of the model that fits
    room = torch.where(member > 0, room, torch.inf).amin(-1) / speed[..., 0]
    return torch.stack([
        speed[..., 0] * S, (speed[..., 0] * S).log(), size / K, (size > 1).float(), position,
        1 / (S - torch.arange(S)).expand(A, N, S),
        (flight[..., 0] / 8).expand(A, N, S), _squash(ahead), _squash(back), _squash(before), _squash(back_before),
        _squash(ahead + back), _squash(reduce), room.log().clamp(-2, 2), (room < 1).float(),
        (position == 1).float()], -1)


def _squash(ratio):
    """0 for nothing, 1 at the stage time's size, growing with the logarithm."""
    return torch.log1p(20 * ratio) / 3


def features(problems: Batch) -> Features:
    """What the network reads of A problems with equal K, S, schedule and transfers."""
    layer_s = problems.forward_s + problems.backward_s  # [A, L, K]
    A, L, K = layer_s.shape
    S, M = problems.stages, problems.micro_batches
    total = np.maximum(layer_s.sum(1), 1e-30)  # [A, K] the whole model on one device
    balanced = 1.0 / (1.0 / total).sum(1)  # [A] stage time if the work were shared by speed
    speed = balanced[:, None] / total
    output = problems.output_bytes[:, :max(L - 1, 1)].mean(1)
    diagonal = np.eye(K, dtype=bool)
    s_per_byte = np.where(diagonal, 0.0, 1.0 / problems.bandwidth_bytes_per_s)
    transfer = (problems.latency_s + output[:, None, None] * s_per_byte) / balanced[:, None, None]
    reduce = problems.gradient_bytes.sum(1)[:, None, None] * s_per_byte / (M * balanced)[:, None, None]
    delay = problems.latency_s / balanced[:, None, None]
    back = transfer.transpose(0, 2, 1)
    log_time = _log(transfer)
    row = log_time.sum(2) / max(K - 1, 1)  # [A, K] the diagonal adds nothing
    column = log_time.sum(1) / max(K - 1, 1)
    off = ~diagonal
    pairs = np.stack([log_time, _log(back), _log(transfer + back), np.tanh(transfer + back),
                      (log_time - row[:, :, None]) * off, (log_time - column[:, None]) * off,
                      _log(reduce / S), _log(delay)], -1)
    pairs[:, diagonal] = 0.0
    static, stash = problems.static_bytes.sum(1), problems.stash_bytes.sum(1)
    memory = problems.memory_bytes
    capacity = np.stack([memory / (static + 1.0)[:, None], memory / (stash + 1.0)[:, None]], -1)
    needed = speed * (static + stash * min(M, S))[:, None] + 1.0
    rank = np.argsort(np.argsort(-speed, axis=1, kind="stable"), axis=1)
    log_speed = np.log(speed * K)
    nearest = np.where(diagonal, np.inf, transfer).min(2) if K > 1 else np.zeros((A, K))
    devices = np.stack([log_speed, rank / K, _clip(np.log(memory / needed + 1e-9)),
                        _clip(np.log(capacity[..., 0] * S + 1e-9)),
                        _clip(np.log(capacity[..., 1] + 1e-9)), row, column, _log(nearest),
                        _clip(np.log(memory / memory.mean(1, keepdims=True).clip(1.0) + 1e-9))], -1)
    work = layer_work(layer_s)  # [A, L]
    unit = np.ones(A)
    globals_ = np.stack([
        np.log(S) * unit, np.log(M) * unit, S / K * unit, np.log(K) * unit, np.log(L / S) * unit,
        min(M / S, 8.0) / 4 * unit, 1 / S * unit, work[:, 0] * S, work[:, -1] * S,
        problems.forward_s.sum((1, 2)) / np.maximum(layer_s.sum((1, 2)), 1e-30),
        (problems.schedule == "gpipe") * unit, (problems.transfers == "overlapped") * unit, row.mean(1),
        log_speed.std(1), row.std(1),
        _clip(np.log((memory.sum(1) + 1.0) / (static + stash * min(M, S) / 2 + 1.0)))], -1)
    as_tensor = lambda a: torch.from_numpy(np.ascontiguousarray(a, dtype=np.float32))
    return Features(*map(as_tensor, (globals_, devices, pairs, speed, rank, np.minimum(transfer, 1e6),
                                     np.minimum(reduce, 1e6), np.clip(capacity, 1e-6, 1e6),
                                     np.broadcast_to(in_flight(problems.schedule, S, M), (A, S)))), S)


def _log(ratio):
    return (np.log(ratio.clip(0, 1e4) + 0.003) + 2.0) / 2.0


def _clip(value):
    return value.clip(-3.0, 3.0)


def _same(*names):
    """Hides what tells the devices apart in these fields: all as the mean one."""
    mean = lambda a: np.broadcast_to(a.mean(-1, keepdims=True), a.shape)
    return lambda problems: replace(problems, **{name: mean(getattr(problems, name)) for name in names})


# what an ablation keeps from the network: the problem that it sees in place of the true one
BLIND = {
    "links": lambda p: replace(p, bandwidth_bytes_per_s=np.full_like(p.bandwidth_bytes_per_s, 1e30),
                               latency_s=np.zeros_like(p.latency_s)),
    "devices": _same("forward_s", "backward_s", "memory_bytes"),
    "memory": lambda p: replace(p, memory_bytes=np.full_like(p.memory_bytes, 1e15)),
    "micro-batches": lambda p: replace(p, micro_batches=16),
    "stages": lambda p: replace(p, stages=p.memory_bytes.shape[1])}
