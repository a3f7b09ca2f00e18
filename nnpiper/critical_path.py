"""Paths through the exact schedule whose lengths have a closed form: lower bounds of the step, stage by stage.

The step is the longest path through the operations of the schedule, so that the length of any path is a lower bound,
and so is each formula below. A pipeline's end, the stages from s on, is summed up in a label; `extend` puts a stage in
front. A label is a few numbers of which more is never less of a bound, so that the numbers may be lower bounds, too.

Symbols: stage s of S, n = S - s, M micro-batches; u = F + B; c both transfers over the boundary behind s, `channel` the
longer of them. With blocking transfers a stage is busy while it sends: its sends count into F and B, and c = 0. R(s) =
u + c + R(s + 1): one micro-batch from s to the last stage and back. All paths start with F(s, 0); the stages before s
lead to it with F and transfer of micro-batch 0 and, where a path ends with B(s, M - 1), follow with B and transfer of
M - 1.

GPipe. The F's are a flow shop of M equal jobs, and so are the B's after them: V(s) = R(s) + (M - 1) (max F + max B)
over the stages from s on, transfers included. The step is V(0), or longer for an all-reduce: A(s) to the end of one,
less the part (M - 1) max F, which a stage in front may add to.

1F1B. V(s) = max(own(s), u + c + V(s + 1)), with own(s) the paths that return to s:
- M <= n: all F's come before all B's: M u, or R + (M - 1) max(F, B, channel).
- M > n, in three parts. Until B(s, 0) has ended: n F + B, as n F's come first, or R. Then M - 1 - n micro-batches from
  F(s, n) to F(s, M - 1): one at a time for u each; or n at a time for R, as B(s, m) comes just before F(s, m + n); or
  d < n at a time for the way to stage s + d - 1 and back, w(d), as there F(m) comes just before B(m - n + d), which
  lets s go on with F(m + d) (here d = 2, 3); what is left over also on the channel, which carries one at a time, on one
  of those ways. From F(s, M - 1) to B(s, M - 1): F + n B, as n B's come last, or R.
- R + (M - 1) channel.
All-reduces: E(s) from the start of F(s, M - 1) to the end of an all-reduce, max(R + all-reduce, F + transfer +
E(s + 1)), and A(s) from F(s, 0): V + all-reduce, F + transfer + A(s + 1), or own(s) up to F(s, M - 1), then E(s + 1).

A label: R, V, A, E under 1F1B, and w(1), w(2) where transfers run beside compute; R, max F, A, max B under GPipe.
"""

from numba import njit

from .cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD


@njit(cache=True)
def own_paths(F, B, around, channel, n, M, two, three):
    """1F1B: the longest path from the start of F(s, 0) to the end of B(s, M - 1), and to the end of F(s, M - 1). around
    is R(s); two, three are w(2), w(3), or 0 where they are not known."""
    u = F + B
    if M <= n:
        return max(M * u, around + (M - 1) * max(F, B, channel)), M * F
    if n == 1:
        return M * u, M * u - B
    into, out_of = max(n * F + B, around), max(F + n * B, around)
    Q = M - 1 - n
    between = Q * u
    each = max(u, channel)
    if Q >= n and (around > n * u or channel > u):
        between = max(between, Q // n * around + Q % n * each)
    if Q >= 2 and n > 2 and (two > 2.0 * u or channel > u):
        between = max(between, Q // 2 * two + Q % 2 * each)
    if Q >= 3 and n > 3 and (three > 3.0 * u or channel > u):
        between = max(between, Q // 3 * three + Q % 3 * each)
    return max(into + between + out_of, around + (M - 1) * channel), into + between + F


@njit(cache=True)
def extend(rest, F, B, ahead, back, all_reduce, n, M, one_f_one_b, out):
    """Put a stage before an end with label `rest`: write the label of both to out, return its V. ahead, back: transfers
    over the boundary behind the stage, beside compute; with blocking transfers 0, as F and B hold the sends."""
    if not one_f_one_b:
        out[0], out[1], out[2], out[3] = _extend_gpipe(rest[0], rest[1], rest[2], rest[3], F, B, ahead, back,
                                                       all_reduce, M)
        return out[0] + (M - 1) * (out[1] + out[3])
    ways = out.shape[0] > 4
    two, three = (rest[4], rest[5]) if ways else (0.0, 0.0)
    out[0], out[1], out[2], out[3], two, three = _extend_1f1b(rest[0], rest[1], rest[2], rest[3], two, three, F, B,
                                                              ahead, back, all_reduce, n, M, ways)
    if ways:
        out[4], out[5] = two, three
    return out[1]


@njit(cache=True, inline="always")
def _extend_gpipe(around, forward, finish, backward, F, B, ahead, back, all_reduce, M):
    """`extend` with the parts of a label as numbers: R, max F, A, max B."""
    around += F + B + ahead + back
    backward = max(backward, B, back)
    finish = max(around + (M - 1) * backward + all_reduce, F + ahead + finish)
    return around, max(forward, F, ahead), finish, backward


@njit(cache=True, inline="always")
def _extend_1f1b(around, v, finish, last, two, three, F, B, ahead, back, all_reduce, n, M, ways):
    """`extend` with the parts of a label as numbers: R, V, A, E, w(1), w(2); w are 0 unless `ways`."""
    u, c = F + B, ahead + back
    around += u + c
    two, three = (u + c + two, u + c + three) if ways else (0.0, 0.0)
    own, until_last_forward = own_paths(F, B, around, max(ahead, back), n, M, two, three)
    v = max(own, u + c + v)
    finish = max(v + all_reduce, F + ahead + finish, until_last_forward + ahead + last)
    return around, v, finish, max(around + all_reduce, F + ahead + last), u if ways else 0.0, two


@njit(cache=True)
def value(label, M, one_f_one_b):
    """The longest path of a label, s."""
    return _value(label[0], label[1], label[2], label[3], M, one_f_one_b)


@njit(cache=True, inline="always")
def _value(a, b, c, d, M, one_f_one_b):
    return max(b, c) if one_f_one_b else max(a + (M - 1) * d, c) + (M - 1) * b


@njit(cache=True)
def label_parts(blocking, one_f_one_b):
    """Parts of a label: w is used where transfers run beside compute."""
    return 6 if one_f_one_b and not blocking else 4


@njit(cache=True)
def longest_path(stages, s, ahead, back, M, blocking, one_f_one_b, rest):
    """The longest path of a pipeline in s: the stages 0 .. s of stage arrays [5, S] before an end with label `rest`
    (0 where s is the last stage), with the transfers ahead and back to it."""
    # a, b, c, d: the parts of a label in their order
    S, ways = stages.shape[1], rest.shape[0] > 4
    a, b, c, d = rest[0], rest[1], rest[2], rest[3]
    two, three = (rest[4], rest[5]) if ways else (0.0, 0.0)
    for t in range(s, -1, -1):
        F, B = stages[FORWARD, t], stages[BACKWARD, t]
        if t < s:
            ahead, back = stages[SEND_FORWARD, t], stages[SEND_BACKWARD, t]
        if blocking:
            F, B = F + ahead, B + (stages[SEND_BACKWARD, t - 1] if t > 0 else 0.0)
            ahead = back = 0.0
        if one_f_one_b:
            a, b, c, d, two, three = _extend_1f1b(a, b, c, d, two, three, F, B, ahead, back, stages[ALL_REDUCE, t],
                                                  S - t, M, ways)
        else:
            a, b, c, d = _extend_gpipe(a, b, c, d, F, B, ahead, back, stages[ALL_REDUCE, t], M)
    return _value(a, b, c, d, M, one_f_one_b)
