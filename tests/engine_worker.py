"""One rank of exported torch plans, started by torchrun for test_engine.py.

engine_worker.py FOLDER PLAN.py ...: runs one step of each plan; writes rankR.pt with what this rank saw.
"""

import datetime
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, BLOCKS, SEQUENCES, TOKENS, MICRO_BATCHES = 13, 8, 8, 6, 5, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.attn(self.ln_1(x)).chunk(3, -1)
        mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=x.dtype).triu(1)
        x = x + self.proj(torch.softmax(q @ k.transpose(-1, -2) / WIDTH ** 0.5 + mask, -1) @ v)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small GPT with the module names of Hugging Face's GPT2LMHeadModel."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(TOKENS, WIDTH),
            "h": nn.ModuleList(Block() for _ in range(BLOCKS)), "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def model_and_data():
    """The same on every rank: the model, tokens and targets [SEQUENCES, TOKENS]."""
    generator = torch.Generator().manual_seed(5)
    model = GPT().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    data = torch.randint(VOCABULARY, (2, SEQUENCES, TOKENS), generator=generator)
    return model, data[0], data[1]


def step(path):
    """What this rank sees of one training step of an exported plan."""
    model, tokens, target = model_and_data()
    schedule = runpy.run_path(path)["build_schedule"](
        model, (tokens[:SEQUENCES // MICRO_BATCHES],), torch.device("cpu"), loss)
    stage, operations, kept = schedule._stage, [], [0]

    def keep(tensor):
        kept[0] += tensor.numel()
        return tensor

    def record(name, kind):
        run = getattr(stage, name)

        def recorded(m, *arguments, **keywords):
            operations.append((kind, m))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return run(m, *arguments, **keywords)
        setattr(stage, name, recorded)

    record("forward_one_chunk", "F")
    record("backward_one_chunk", "B")
    losses = []
    inputs = (tokens,) if stage.is_first else ()
    targets = {"target": target, "losses": losses} if stage.is_last else {}
    schedule.step(*inputs, **targets)
    return {"stage": stage.stage_index, "operations": operations, "kept": kept[0],
            "losses": [value.item() for value in losses],
            "gradients": {name: parameter.grad for name, parameter in stage.submod.named_parameters()}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, plans = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    seen = [step(path) for path in plans]
    device = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
    torch.save({"device": device, "plans": seen}, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
