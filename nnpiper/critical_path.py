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
    u, c, channel = F + B, ahead + back, max(ahead, back)
    around = u + c + rest[0]
    out[0] = around
    if not one_f_one_b:
        out[1], out[3] = max(rest[1], F, ahead), max(rest[3], B, back)
        out[2] = max(around + (M - 1) * out[3] + all_reduce, F + ahead + rest[2])
        return around + (M - 1) * (out[1] + out[3])
    two = three = 0.0
    if out.shape[0] > 4:
        two, three = u + c + rest[4], u + c + rest[5]
        out[4], out[5] = u, two
    own, until_last_forward = own_paths(F, B, around, channel, n, M, two, three)
    v = max(own, u + c + rest[1])
    out[1] = v
    out[2] = max(v + all_reduce, F + ahead + rest[2], until_last_forward + ahead + rest[3])
    out[3] = max(around + all_reduce, F + ahead + rest[3])
    return v


@njit(cache=True)
def value(label, M, one_f_one_b):
    """The longest path of a label, s."""
    if one_f_one_b:
        return max(label[1], label[2])
    return max(label[0] + (M - 1) * label[3], label[2]) + (M - 1) * label[1]


@njit(cache=True)
def label_parts(blocking, one_f_one_b):
    """Parts of a label: w is used where transfers run beside compute."""
    return 6 if one_f_one_b and not blocking else 4


@njit(cache=True)
def longest_path(stages, s, ahead, back, M, blocking, one_f_one_b, labels):
    """The longest path of a pipeline in s: the stages 0 .. s of stage arrays [5, S] before an end with label labels[0]
    (0 where s is the last stage), with the transfers ahead and back to it. labels [2, parts] is scratch."""
    S, at = stages.shape[1], 0
    for t in range(s, -1, -1):
        F, B = stages[FORWARD, t], stages[BACKWARD, t]
        if t < s:
            ahead, back = stages[SEND_FORWARD, t], stages[SEND_BACKWARD, t]
        if blocking:
            F, B = F + ahead, B + (stages[SEND_BACKWARD, t - 1] if t > 0 else 0.0)
            ahead = back = 0.0
        extend(labels[at], F, B, ahead, back, stages[ALL_REDUCE, t], S - t, M, one_f_one_b, labels[1 - at])
        at = 1 - at
    return value(labels[at], M, one_f_one_b)
