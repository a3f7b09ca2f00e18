"""Receives before sends in torch's batched exchanges.

Over gloo a batch is started in list order, and torch's 1F1B lists the send first: its payload fills the one connection
that also carries the notice "receive posted", so the peer's payload waits and both directions run one after the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def reordered(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The same operations, receives first; otherwise in their order."""
    return sorted(operations, key=lambda operation: operation.op is not dist.irecv)


@contextmanager
def receives_first() -> Iterator[None]:
    """Within the `with`, every batch that reaches `dist.batch_isend_irecv` (also from inside torch's schedules) posts
    its receives before its sends. For one thread; torch's schedules wait for a whole batch, so its order has no other
    effect.

    >>> with receives_first():
    ...     schedule.step(batch)  # doctest: +SKIP
    """
    original = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: original(reordered(operations))
    try:
        yield
    finally:
        dist.batch_isend_irecv = original
