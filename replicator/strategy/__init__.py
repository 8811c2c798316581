# SPDX-License-Identifier: Apache-2.0
"""Strategies: where each variable is placed and how its gradient is reduced.

`Replicator(devices, strategy=...)` takes a builder, builders by patterns of variables'
paths, a Strategy, or the path of a saved one.

Example:
    >>> from replicator import strategy
    >>> rules = {"embedding": strategy.PSLoadBalancing(), ".*": strategy.AllReduce()}
    >>> repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=rules)
    >>> with repl.context():
    ...     table = tf.Variable(tf.zeros([8, 2]), name="embedding/table")
    ...     scale = tf.Variable(1.0, name="scale")
    >>> for node in repl.strategy.nodes: print(node.name, node.sent)
    embedding/table 128
    scale 8
    >>> repl.strategy.save("strategy.pb")
    >>> repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy="strategy.pb")
"""

from replicator.strategy.builder import Builder
from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.builders.auto import Auto
from replicator.strategy.builders.parallax import Parallax
from replicator.strategy.builders.partitioned import (
    Partitioned,
    PartitionedAR,
    PartitionedPS,
    RandomAxisPartitionAR,
    UnevenPartitionedPS,
)
from replicator.strategy.builders.ps import PS, PSLoadBalancing
from replicator.strategy.builders.sharded import Mirrored, Sharded
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.strategy.predictions import Assumed
from replicator.strategy.rules import Rules
from replicator.strategy.trials import Trial
from replicator.strategy.tuning import tune
from replicator.variables.synchronizer import AllReduceSynchronizer, PSSynchronizer

__all__ = [
    "PS",
    "AllReduce",
    "AllReduceSynchronizer",
    "Assumed",
    "Auto",
    "Builder",
    "Mirrored",
    "Node",
    "PSLoadBalancing",
    "PSSynchronizer",
    "Parallax",
    "Partitioned",
    "PartitionedAR",
    "PartitionedPS",
    "RandomAxisPartitionAR",
    "Resources",
    "Rules",
    "Sharded",
    "Strategy",
    "Trial",
    "UnevenPartitionedPS",
    "VariableFacts",
    "tune",
]
