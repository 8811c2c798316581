# SPDX-License-Identifier: Apache-2.0
"""torch on several hosts: DistributedDataParallel and all_reduce, over gloo.

Run by `benchmarks.hosts` on each host, in an environment with torch:
`python -m benchmarks.peers.torch_hosts '{"rank": 0, "meet": "tcp://host:port", ...}'`.
One process per host; together they have one thread per core of this machine.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
import torch.distributed
from torch import nn

from benchmarks import cli, results, timing
from benchmarks.on_hosts import turns
from benchmarks.peers import nets, torch_ddp

# The names that the other programs use for these.
DDP, GLOO = "torch DDP", "gloo"


def train(workload: nets.Workload, rank: int) -> timing.Run:
    """Returns a run that trains a network by DistributedDataParallel."""
    model = torch_ddp.make_model(workload.network)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    batch = workload.parts(torch_ddp.REPLICAS)[rank]
    return timing.in_turn(torch_ddp.make_step(model, batch))


def reduce(nbytes: int, rank: int) -> timing.Run:
    """Returns a run that sums one tensor per host."""
    tensor = torch.full([nbytes // 4], 2.0**rank)
    torch.distributed.all_reduce(tensor)
    if not bool((tensor == 2.0**torch_ddp.REPLICAS - 1).all()):
        cli.fail(f"{GLOO} gives a wrong sum of {nbytes} bytes")
    tensor.zero_()  # repeated sums must not overflow

    def step() -> float:
        torch.distributed.all_reduce(tensor)
        return 0.0

    return timing.in_turn(step)


def main(arguments: str) -> None:
    """Joins the other hosts, and takes turns."""
    config = json.loads(arguments)
    rank = config["rank"]
    torch.set_num_threads(max(1, results.cores() // torch_ddp.REPLICAS))
    torch.distributed.init_process_group(
        "gloo",
        init_method=config["meet"],
        rank=rank,
        world_size=torch_ddp.REPLICAS,
    )
    workloads = {workload.name: workload for workload in nets.WORKLOADS}
    turns.answer(
        {
            **{
                f"{name}/{DDP}": functools.partial(train, workloads[name], rank)
                for name in config["networks"]
            },
            **{
                f"{name}/{GLOO}": functools.partial(reduce, nbytes, rank)
                for name, nbytes in config["sizes"].items()
            },
        }
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
