"""A second cost model and simulator, plain, slow and written apart from the package: Python loops and a heap of events.

It follows the definitions alone and shares no code with `nnpiper.cost`, `nnpiper.schedule` or `nnpiper.simulator`.
Symbols: L layers, K devices, S stages, M micro-batches; F and B the forward and backward pass of a micro-batch.
"""

import heapq
import math
from dataclasses import dataclass


@dataclass
class SlowStages:
    """Stage times in s: F, B, all_reduce have S entries; forward_c, backward_c S - 1, entry s between s and s + 1."""

    F: list
    B: list
    forward_c: list
    backward_c: list
    all_reduce: list


def slow_layers(problem, strategy):
    """The list of layers of every stage."""
    stages = [[]]
    for layer in range(problem.layers):
        if layer in strategy.cuts:
            stages.append([])
        stages[-1].append(layer)
    return stages


def slow_fractions(problem, group, layers):
    """Device -> share of each micro-batch, proportional to 1 / (tF + tB). Devices that need no time at all share it
    evenly: the limit of the formula as their times go to zero together."""
    alone = {k: sum(problem.forward_s[l, k] + problem.backward_s[l, k] for l in layers) for k in group}
    free = [k for k in group if alone[k] == 0.0]
    if free:
        return {k: 1.0 / len(free) if k in free else 0.0 for k in group}
    speeds = {k: 1.0 / alone[k] for k in group}
    return {k: speeds[k] / sum(speeds.values()) for k in group}


def slow_transfer(problem, senders, receivers, size_bytes):
    """Seconds until the busiest network interface has sent, or received, its parts; groups as device -> share."""
    def part(g, h):
        return problem.latency_s[g, h] + senders[g] * receivers[h] * size_bytes / problem.bandwidth_bytes_per_s[g, h]

    sending = [sum(part(g, h) for h in receivers) for g in senders]
    receiving = [sum(part(g, h) for g in senders) for h in receivers]
    return max(sending + receiving)


def slow_stages(problem, strategy):
    layers = slow_layers(problem, strategy)
    fractions = [slow_fractions(problem, group, part) for group, part in zip(strategy.groups, layers)]
    out = SlowStages([], [], [], [], [])
    for group, part, a in zip(strategy.groups, layers, fractions):
        out.F.append(max(a[k] * sum(problem.forward_s[l, k] for l in part) for k in group))
        out.B.append(max(a[k] * sum(problem.backward_s[l, k] for l in part) for k in group))
        n = len(group)
        if n == 1:
            out.all_reduce.append(0.0)
        else:
            pairs = [(g, h) for g in group for h in group if g != h]
            slowest = min(problem.bandwidth_bytes_per_s[g, h] for g, h in pairs)
            latency = max(problem.latency_s[g, h] for g, h in pairs)
            size = sum(problem.gradient_bytes[l] for l in part)
            out.all_reduce.append(2.0 * (n - 1) / n * size / slowest + 2.0 * (n - 1) * latency)
    for s in range(len(layers) - 1):
        size = problem.output_bytes[layers[s][-1]]
        out.forward_c.append(slow_transfer(problem, fractions[s], fractions[s + 1], size))
        out.backward_c.append(slow_transfer(problem, fractions[s + 1], fractions[s], size))
    return out


def slow_memory(problem, strategy):
    """Device -> bytes needed; devices that the strategy leaves unused are absent."""
    need = {}
    for s, (group, part) in enumerate(zip(strategy.groups, slow_layers(problem, strategy))):
        kept = problem.micro_batches
        if problem.schedule == "1f1b":
            kept = min(problem.micro_batches, len(strategy.groups) - s)
        for k, share in slow_fractions(problem, group, part).items():
            need[k] = sum(problem.static_bytes[l] + kept * share * problem.stash_bytes[l] for l in part)
    return need


def slow_order(schedule, S, M, s):
    """The operations of stage s, as ("F", m) and ("B", m)."""
    forwards, backwards = [("F", m) for m in range(M)], [("B", m) for m in range(M)]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = min(S - s - 1, M)
    order = forwards[:warm_up]
    for f, b in zip(forwards[warm_up:], backwards):
        order += [f, b]
    return order + backwards[M - warm_up:]


def slow_step(stages, M, schedule, transfers):
    """Step time in seconds, and the lists of (stage, kind, micro-batch, start, end) of operations and of transfers
    (a transfer bears the stage that sends). A heap of events; nothing starts before an event that allows it."""
    S = len(stages.F)
    todo = [slow_order(schedule, S, M, s) for s in range(S)]
    busy = [False] * S
    arrived = {("F", 0, m) for m in range(M)} | {("B", S - 1, m) for m in range(M)}  # what nobody sends
    finished, queues, in_use = set(), {}, set()
    events, ticket = [], 0  # (time, ticket, what happens, its data)
    operations, sent = [], []
    last = [0.0] * S

    def after(time, what, data):
        nonlocal ticket
        ticket += 1
        heapq.heappush(events, (time, ticket, what, data))

    def start_what_can(now):
        for s in range(S):
            if not busy[s] and todo[s]:
                kind, m = todo[s][0]
                if (kind, s, m) in arrived and (kind == "F" or ("F", s, m) in finished):
                    todo[s].pop(0)
                    busy[s] = True
                    end = now + (stages.F[s] if kind == "F" else stages.B[s])
                    operations.append((s, kind, m, now, end))
                    after(end, "computed", (kind, s, m))
        for link, queue in queues.items():
            if queue and link not in in_use:
                kind, s = link
                m = queue.pop(0)
                in_use.add(link)
                end = now + (stages.forward_c[s] if kind == "F" else stages.backward_c[s - 1])
                sent.append((s, kind, m, now, end))
                after(end, "arrived", (kind, s, m))

    start_what_can(0.0)
    while events:
        now, _, what, (kind, s, m) = heapq.heappop(events)
        if what == "computed":
            finished.add((kind, s, m))
            last[s] = now
            sends = s < S - 1 if kind == "F" else s > 0
            if sends:
                queues.setdefault((kind, s), []).append(m)
            if not (sends and transfers == "blocking"):
                busy[s] = False
        else:
            in_use.remove((kind, s))
            arrived.add((kind, s + 1 if kind == "F" else s - 1, m))
            if transfers == "blocking":
                busy[s] = False
                last[s] = now
        start_what_can(now)
    assert not any(todo), "the schedule waits for itself"
    return max(last[s] + stages.all_reduce[s] for s in range(S)), operations, sent


def slow_bound(stages, M, schedule):
    """The larger of the two bounds that hold for every stage, whatever the transfer mode. Each leads through stage s:
    its share of work, or under 1F1B the round trips to the last stage and back that its S - s places allow."""
    S = len(stages.F)
    bound = 0.0
    for s in range(S):
        head = sum(stages.F[i] + stages.B[i] + stages.forward_c[i] + stages.backward_c[i] for i in range(s))
        bound = max(bound, head + M * (stages.F[s] + stages.B[s]))
        if schedule == "1f1b":
            trip = stages.F[s] + stages.B[s] + sum(
                stages.F[i] + stages.B[i] + stages.forward_c[i - 1] + stages.backward_c[i - 1] for i in range(s + 1, S))
            bound = max(bound, head + math.ceil(M / (S - s)) * trip)
    return bound
