"""A stage's compute: an autograd function that takes the stage's time and moves tensors of the true size.

y = w x[0] e_0, whatever the sizes: a linear map that costs nothing but has a gradient, so that a whole pipeline of them
can be checked. The rest of the time is slept.
"""

import time

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stage):
        begin = time.monotonic()
        ctx.stage, ctx.micro_batch, ctx.entered = stage, stage.next_micro_batch, x.shape
        stage.next_micro_batch += 1
        ctx.save_for_backward(x[0, 0].clone(), weight)  # not x itself: its buffer is used again
        y = torch.zeros(1, stage.leaves)
        y[0, 0] = weight * x[0, 0]
        _sleep_until(begin + stage.forward_s)
        stage.operations.append(["F", ctx.micro_batch, begin, time.monotonic()])
        return y

    @staticmethod
    def backward(ctx, gradient):
        begin = time.monotonic()
        first, weight = ctx.saved_tensors
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.zeros(ctx.entered)
            back[0, 0] = weight * gradient[0, 0]
        _sleep_until(begin + ctx.stage.backward_s)
        ctx.stage.operations.append(["B", ctx.micro_batch, begin, time.monotonic()])
        return back, first * gradient[0, 0], None


class Stage(nn.Module):
    """Maps [1, n] to [1, leaves] numbers in forward_s, and their gradients back in backward_s (0 until `reset`).

    operations: [kind "F" or "B", micro-batch, begin, end] of what ran since the last reset, monotonic s
    """

    def __init__(self, leaves: int, weight: float):
        super().__init__()
        self.leaves, self.weight = leaves, nn.Parameter(torch.tensor(weight))
        self.reset(0.0, 0.0)

    def reset(self, forward_s: float, backward_s: float) -> None:
        """Before a step: no operations, no gradient, micro-batches from 0; forward passes run in their order."""
        self.forward_s, self.backward_s = forward_s, backward_s
        self.operations, self.next_micro_batch, self.weight.grad = [], 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)


def _sleep_until(end: float) -> None:
    left = end - time.monotonic()
    if left > 0:
        time.sleep(left)
