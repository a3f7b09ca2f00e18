"""Trains under torchrun for test_vcta.py: each process also writes down the weights that it ended with.

python -m torch.distributed.run ... train_worker.py FOLDER STEPS
"""

import functools
import os
import sys
from pathlib import Path

import torch
from networks import TINY

from nnpiper import vcta

networks = []


class Kept(vcta.Network):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        networks.append(self)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    vcta.Network = Kept
    vcta.Validation = functools.partial(vcta.Validation, instances=3, moves=500)
    vcta.train(out, vcta.Recipe(steps=steps, seed=1, instances=4, groupings=4, divisions=3, size=TINY), progress=False)
    torch.save(networks[0].state_dict(), out / f"rank{os.environ['RANK']}.pt")
