# SPDX-License-Identifier: Apache-2.0
"""torch: DistributedDataParallel over gloo, beside one process with the whole batch.

Run by `python -m benchmarks.peers`, in an environment with torch. Each contender has
one process per replica; they take turns, and idle ones wait on a pipe. The single
device has one thread per core, and so have all replicas together. Gradients are views
of DDP's buckets, which saves it a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import nn

from benchmarks import networks, results, timing
from benchmarks.peers import nets
from benchmarks.peers.ratios import SINGLE

NAME = "torch"
REPLICAS = 2
DDP = "DistributedDataParallel"


class LanguageModel(nn.Module):
    """The network of networks.LanguageModel."""

    def __init__(self, network: networks.LanguageModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(network.characters, network.units)
        self.lstm = nn.LSTM(
            network.units, network.units, network.layers, batch_first=True
        )
        self.logits = nn.Linear(network.units, network.characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, length, characters] of text [batch, length]."""
        return self.logits(self.lstm(self.embedding(text))[0])


def make_model(network: nets.Network) -> nn.Module:
    """Returns a new model, with the same weights in each process."""
    torch.manual_seed(0)
    if isinstance(network, networks.LanguageModel):
        return LanguageModel(network)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(network.sizes, network.sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers[:-1])


def make_step(model: nn.Module, batch: networks.Batch) -> Callable[[], torch.Tensor]:
    """Returns a function that trains a model by one step and returns the loss."""
    optimizer = torch.optim.SGD(
        model.parameters(), networks.LEARNING_RATE, networks.MOMENTUM
    )
    examples, labels = (torch.from_numpy(part.copy()) for part in batch)
    labels = labels.long().flatten()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(examples)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def serve(
    pipe: Connection, workload: nets.Workload, rank: int | None, meet: str
) -> None:
    """Runs as many steps as the pipe requests, until it requests none.

    Args:
        pipe: Receives numbers of steps, sends lists of samples.
        workload: The workload to train.
        rank: The replica; None for the single device.
        meet: The file by which the replicas find each other.
    """
    threads = results.cores()
    torch.set_num_threads(threads if rank is None else max(1, threads // REPLICAS))
    model = make_model(workload.network)
    if rank is None:
        step = make_step(model, workload.parts(1)[0])
    else:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=REPLICAS
        )
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        step = make_step(model, workload.parts(REPLICAS)[rank])
    run = timing.in_turn(step)
    while count := pipe.recv():
        pipe.send(run(count))
    if rank is not None:
        torch.distributed.destroy_process_group()


@dataclasses.dataclass
class Servers:
    """The processes of one contender."""

    pipes: list[Connection]
    processes: list[Any]

    def run(self, count: int) -> list[timing.Sample]:
        """Runs steps; returns replica 0's times and mean losses."""
        for pipe in self.pipes:
            pipe.send(count)
        samples = [pipe.recv() for pipe in self.pipes]
        return [
            timing.Sample(step[0].seconds, sum(s.loss for s in step) / len(step))
            for step in zip(*samples, strict=True)
        ]

    def stop(self) -> None:
        """Ends all processes."""
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            process.join()


def start(workload: nets.Workload, ranks: list[int | None], folder: str) -> Servers:
    """Starts the processes of a contender."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in ranks:
        parent_end, child_end = context.Pipe()
        arguments = (child_end, workload, rank, f"{folder}/{workload.name}")
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        child_end.close()  # so that the parent's read ends when the process dies
        pipes.append(parent_end)
        processes.append(process)
    return Servers(pipes, processes)


@contextlib.contextmanager
def runs(workload: nets.Workload) -> Iterator[dict[str, timing.Run]]:
    """Yields all contenders, by name; their processes end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        alone = start(workload, [None], folder)
        replicas = start(workload, list(range(REPLICAS)), folder)
        try:
            yield {SINGLE: alone.run, DDP: replicas.run}
        finally:
            alone.stop()
            replicas.stop()
