"""What torch's two schedules do over transfers that need both sides: a step, operation by operation.

Over gloo a payload leaves when the sender has started its send and the receiver has posted its receive. The
simulator's modes know the sender alone: "blocking" keeps it busy until the transfer has arrived, and lets a transfer
arrive while its receiver computes. Here are the programs that Schedule1F1B and ScheduleGPipe run (torch 2.13) and their
exact time under this rule, to tell the engine's semantics from its noise. Plain Python, for a few hundred strategies.

Symbols: S stages, M micro-batches, F(s), B(s), c(s); a message is (kind, boundary, micro-batch), kind F an activation
over a boundary ahead, kind B a gradient back.
"""

from ..cost import StageArrays
from ..schedule import B, F

POST, WAIT, COMPUTE = range(3)


def program(schedule: str, s: int, S: int, M: int) -> list[tuple]:
    """What stage s does in order: (POST, messages) starts sends and receives, (WAIT, messages) waits for them,
    (COMPUTE, kind, micro-batch)."""
    def receives(kind, m):
        boundary = s - 1 if kind == F else s
        return [(kind, boundary, m)] if 0 <= boundary < S - 1 else []

    def sends(kind, m):
        boundary = s if kind == F else s - 1
        return [(kind, boundary, m)] if 0 <= boundary < S - 1 else []

    def exchange(messages):
        return [(POST, messages), (WAIT, messages)]

    steps = []
    if schedule == "gpipe":  # sends are waited for at the end of each phase
        for kind in (F, B):
            for m in range(M):
                steps += [*exchange(receives(kind, m)), (COMPUTE, kind, m), (POST, sends(kind, m))]
            steps.append((WAIT, [message for m in range(M) for message in sends(kind, m)]))
        return steps
    warm_up = min(M, S - s)
    for m in range(warm_up):  # a send is waited for after the next forward pass
        steps += [*exchange(receives(F, m)), (COMPUTE, F, m)]
        if m > 0:
            steps.append((WAIT, sends(F, m - 1)))
        if m < warm_up - 1:
            steps.append((POST, sends(F, m)))
    for m in range(M - warm_up + 1):  # both directions over a boundary are one exchange
        steps += [*exchange(sends(F, m + warm_up - 1) + receives(B, m)), (COMPUTE, B, m)]
        if m < M - warm_up:
            steps += [*exchange(sends(B, m) + receives(F, m + warm_up)), (COMPUTE, F, m + warm_up)]
    steps.append((POST, sends(B, M - warm_up)))
    for m in range(M - warm_up + 1, M):
        steps += [*exchange(receives(B, m)), (COMPUTE, B, m), (WAIT, sends(B, m - 1)), (POST, sends(B, m))]
    return [*steps, (WAIT, sends(B, M - 1))]


def step_time(stages: StageArrays, schedule: str, M: int) -> float:
    """Step in s of "1f1b" or "gpipe": a transfer starts when both sides are there and the one before it over this
    boundary in this direction has ended; then both sides are done with it c later."""
    S = len(stages.forward_s)
    duration = {F: stages.forward_s, B: stages.backward_s}
    transfer = {F: stages.send_forward_s, B: stages.send_backward_s}
    programs, place, now = [program(schedule, s, S, M) for s in range(S)], [0] * S, [0.0] * S
    posted, ended = {}, {(kind, boundary, -1): 0.0 for kind in (F, B) for boundary in range(S - 1)}
    while any(place[s] < len(programs[s]) for s in range(S)):
        before = list(place)
        for s in range(S):
            while place[s] < len(programs[s]):
                what, *rest = programs[s][place[s]]
                if what == COMPUTE:
                    now[s] += duration[rest[0]][s]
                elif what == POST:
                    for message in rest[0]:
                        posted.setdefault(message, []).append(now[s])
                        _finish(message, posted, ended, transfer)
                elif all(message in ended for message in rest[0]):
                    now[s] = max([now[s], *(ended[message] for message in rest[0])])
                else:
                    break
                place[s] += 1
        assert place != before, "every stage waits"
    return float(max(now[s] + stages.all_reduce_s[s] for s in range(S)))


def _finish(message, posted, ended, transfer):
    """Set when a message has arrived, if it is known by now; and the messages after it that waited for that."""
    kind, boundary, m = message
    while len(posted.get((kind, boundary, m), ())) == 2 and (kind, boundary, m - 1) in ended:
        start = max(*posted[kind, boundary, m], ended[kind, boundary, m - 1])
        ended[kind, boundary, m] = start + transfer[kind][boundary]
        m += 1
