"""The NNPiper network: computation costs, communication costs, S and M in; a distribution over strategies out.

Two parts share one encoding of the devices. The *pointer* builds the groups stage by stage: at each step it picks a
device that opens the next stage or joins the open one, or stops and leaves the rest unused. The *divider* reads the
chosen stages and says which share of the work each gets, as a correction of its share of the speed; shares become
cuts at layer boundaries (`search.cuts_by_share`). All costs enter as ratios to the balanced stage time, so the scale
does not matter, and one set of weights serves any L, K, S and M. The network knows the problem's arrays and no planner.

Symbols: A batch of problems (equal K and S), N strategies drawn for each, T = K steps, K devices, S stages, D width.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from . import readings, sampling
from .batch import Batch, assemble
from .features import BLIND, DEVICE_FEATURES, GLOBAL_FEATURES, PAIR_FEATURES, Features, features, flight
from .problem import InputError
from .readings import STAGE_FEATURES, STATE_FEATURES

CHANNELS = 8  # of what a link says to the pointer
POINTER_CLIP = 10.0  # logits are CLIP tanh(x), Bello et al. 2017
SIGMA_RANGE = 0.02, 0.5  # of the log share
DISTANCES = 8  # stages further apart share one attention bias


@dataclass(frozen=True)
class Size:
    """Width, heads and depth of the two parts."""

    width: int = 64
    heads: int = 4
    depth: int = 2
    stage_width: int = 32
    stage_heads: int = 4
    stage_depth: int = 2


class Encoding(NamedTuple):
    """The devices as the pointer needs them, once per problem."""

    nodes: Tensor  # [A, K, D]
    last: Tensor  # [A, K + 1, D] by the device picked last; row K: none yet
    group: Tensor  # [A, K, D] summed over the open group
    free: Tensor  # [A, K, D] averaged over the free devices
    whole: Tensor  # [A, 1, D]
    keys: Tensor  # [A, 2 K, D] open with k, join k
    links: Tensor  # [A, K, K x 2 C] from a device of the open group to each action's device
    earlier: Tensor  # [A, K, K x C] from a device of the group before to one that joins the open group


class State(NamedTuple):
    """A partial strategy (N of them for each problem)."""

    used: Tensor  # [A, N, K] bool
    group: Tensor  # [A, N, K] float, 1 for the open group's devices
    before: Tensor  # [A, N, K] float, 1 for the devices of the group before
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
    order: np.ndarray  # [A, N, K] devices, stage after stage, then the unused
    starts: np.ndarray  # [A, N, S + 1] where each stage's devices begin in `order`

    def take(self, chosen: np.ndarray) -> "Groupings":
        """n of the N groupings of each problem, by their numbers [A, n]."""
        A, N, T = self.actions.shape
        rows, numbers = torch.arange(A)[:, None], torch.from_numpy(chosen)
        states = (part.unflatten(1, (N, T))[rows, numbers].flatten(1, 2) for part in self.states)
        arrays = (np.take_along_axis(part, chosen[..., None], 1) for part in (self.order, self.starts))
        return Groupings(self.actions[rows, numbers], State(*states), *arrays)


def join(one: Groupings, other: Groupings) -> Groupings:
    """The groupings of both, for the same problems."""
    A = len(one.actions)
    stack = lambda a, b: torch.cat([a, b], 1)
    states = (stack(a.view(A, -1, *a.shape[2:]), b) for a, b in zip(one.states, other.states))
    return Groupings(stack(one.actions, other.actions), State(*states),
                     *(np.concatenate(pair, 1) for pair in zip(one[2:], other[2:])))


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
        self.pair_in = nn.Sequential(nn.Linear(PAIR_FEATURES, 32), nn.ReLU(), nn.Linear(32, H * size.depth + 3 * C))
        self.encoder = nn.ModuleList(Block(D, H) for _ in range(size.depth))
        self.node_norm = nn.LayerNorm(D)
        self.to_parts = nn.Linear(D, 5 * D, bias=False)  # last, group, free, open key, join key
        self.to_whole = nn.Linear(D, D)
        self.nothing_yet = nn.Parameter(torch.zeros(D))
        self.state_in = nn.Linear(STATE_FEATURES, D)
        self.query = nn.Sequential(nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D + 3 * C + 1))
        self.divider = Divider(size)

    def features(self, problems: Batch) -> Features:
        """What this network reads of A problems with equal K, S, schedule and transfers."""
        if self.blind:
            seen = features(BLIND[self.blind](problems))
            if self.blind != "stages":
                return seen
            # decoding always knows how many stages it has to fill, and the divider which ones it divides for
            return seen._replace(stages=problems.stages, in_flight=flight(problems))
        return features(problems)

    def encode(self, f: Features) -> Encoding:
        A, K = f.speed.shape
        x = self.device_in(torch.cat([f.devices, f.globals[:, None].expand(A, K, -1)], -1))
        C = CHANNELS
        pairs = self.pair_in(f.pairs)  # [A, K, K, H x depth + 3 C]
        bias = pairs[..., :-3 * C].permute(0, 3, 1, 2).chunk(self.size.depth, 1)  # depth x [A, H, K, K]
        for block, b in zip(self.encoder, bias):
            x = block(x, b)
        x = self.node_norm(x)
        last, group, free, opens, joins = self.to_parts(x).chunk(5, -1)
        last = torch.cat([last, self.nothing_yet.expand(A, 1, -1)], 1)
        return Encoding(x, last, group, free, self.to_whole(x.mean(1, keepdim=True)), torch.cat([opens, joins], 1),
                        pairs[..., -3 * C:-C].reshape(A, K, -1), pairs[..., -C:].reshape(A, K, -1))

    def logits(self, f: Features, e: Encoding, state: State) -> Tensor:
        """[A, N, 2 K + 1] masked logits of the actions from N states a problem."""
        A, N, K = state.used.shape
        C = CHANNELS
        free = (~state.used).float()
        context = e.whole + e.last.gather(1, state.last[..., None].expand(-1, -1, e.last.shape[-1]))
        context = context + torch.baddbmm(state.group @ e.group, free / free.sum(-1, keepdim=True).clamp(min=1), e.free)
        values = readings.read_states(*(part.numpy() for part in (state.used, state.group > 0, state.opened)), f.stages,
                                      f.speed.numpy(), f.outputs.numpy())
        context = context + self.state_in(torch.from_numpy(values))
        q, w, w_earlier, stop = self.query(context).split([self.size.width, 2 * C, C, 1], -1)
        logits = (q @ e.keys.transpose(1, 2)).view(A, N, 2, K) / math.sqrt(self.size.width)
        links = (_mean(state.group) @ e.links).view(A, N, K, 2, C)
        earlier = (_mean(state.before) @ e.earlier).view(A, N, K, C)
        logits = logits + torch.einsum("ankvc,anvc->anvk", links, w.view(A, N, 2, C))
        joins = torch.einsum("ankc,anc->ank", earlier, w_earlier)[:, :, None]
        logits = (logits + functional.pad(joins, (0, 0, 1, 0))).flatten(2)
        logits = POINTER_CLIP * torch.tanh(torch.cat([logits, stop], -1) / POINTER_CLIP)
        return logits.masked_fill(~state.mask(f.rank, f.stages), -torch.inf)

    @torch.no_grad()
    def draw(self, f: Features, e: Encoding, N: int, generator: torch.Generator, greedy: bool = False) -> Groupings:
        """N groupings for each problem; with greedy, number 0 takes the likeliest action at each step."""
        random = torch.randint(1, 2**62, (1,), generator=generator).numpy().astype(np.uint64)
        keys = e.keys.transpose(1, 2) / math.sqrt(self.size.width)
        pointer = sampling.Pointer(*map(as_array, (f.speed, f.rank, f.outputs, e.whole, e.last, e.group, e.free, keys,
                                                 e.links, e.earlier)))
        return _groupings(sampling.draw(pointer, self.query_weights(), f.stages, N, POINTER_CLIP, greedy, random),
                          f.stages)

    def query_weights(self) -> sampling.Query:
        """What `sampling.draw` needs of the weights."""
        layers = self.state_in, self.query[1], self.query[3]
        return sampling.Query(*(as_array(part) for layer in layers for part in (layer.weight.T, layer.bias)))

    def replay(self, f: Features, actions: np.ndarray) -> Groupings:
        """One given grouping for each problem, from actions [A, K], as `draw` returns groupings."""
        return _groupings(actions[:, None], f.stages)

    def log_prob(self, f: Features, e: Encoding, groupings: Groupings) -> Tensor:
        """[A, N] log probability of drawn groupings, with gradient."""
        logits = self.logits(f, e, groupings.states)
        picked = logits.log_softmax(-1).gather(-1, groupings.actions.flatten(1)[..., None])
        return picked.view(groupings.actions.shape).sum(-1)

    def divide(self, f: Features, e: Encoding, groupings: Groupings) -> Divisions:
        """How to divide the layers for each grouping, with gradient."""
        return self.divider(f, e, groupings.order, groupings.starts)


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

    def forward(self, f: Features, e: Encoding, order: np.ndarray, starts: np.ndarray) -> Divisions:
        """From the stages, as `Groupings` has them."""
        A, N, S = starts.shape[0], starts.shape[1], starts.shape[2] - 1
        speed, part, values = map(torch.from_numpy, readings.read_all_stages(order, starts, *(x.numpy() for x in (
            f.speed, f.link, f.link_reduce, f.capacity, f.in_flight, f.outputs))))
        # the shares' noisy gradient stays out of the encoder: it learns from the pointer
        nodes = part.flatten(1, 2) @ self.node_in(e.nodes.detach())
        x = self.stage_in(values) + nodes.view(A, N, S, -1)
        x = (x + self.global_in(f.globals)[:, None, None]).flatten(0, 1)  # [A N, S, D]
        step = torch.arange(S)
        distance = (step[None] - step[:, None]).clamp(-DISTANCES, DISTANCES) + DISTANCES
        bias = self.distance(distance).permute(2, 0, 1)[None].chunk(len(self.blocks), 1)
        for block, b in zip(self.blocks, bias):
            x = block(x, b)
        correction, deviation = self.out(x).view(A, N, S, 2).unbind(-1)
        low, high = SIGMA_RANGE
        sigma = low * (high / low) ** torch.sigmoid(deviation)
        return Divisions(speed.log() + correction, sigma)


class Block(nn.Module):
    """Pre-norm transformer block; `bias` [., H, n, n] is added to the attention logits."""

    def __init__(self, D: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        B, n, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(B, n, D))
        return x + self.mlp(self.norm2(x))


def as_array(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor for compiled code."""
    return np.array(tensor.detach().numpy(), order="C")


def _groupings(actions, S):
    used, group, before, last, opened = (torch.from_numpy(part).flatten(1, 2) for part in sampling.replay(actions))
    return Groupings(torch.from_numpy(actions), State(used, group.float(), before.float(), last, opened),
                     *assemble(actions, S))


def _mean(group):
    """[A, N, K] weights of the mean over a group; zeros where there is none."""
    return group / group.sum(-1, keepdim=True).clamp(min=1)
