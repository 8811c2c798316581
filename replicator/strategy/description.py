# SPDX-License-Identifier: Apache-2.0
"""Strategy: how each variable is placed and synchronized, as plain data.

One Node per trainable variable states where it is, its parts, and how its gradient is
reduced. Builders create nodes, compiled.py turns them into placements and
synchronizers, files.py writes and reads them.

Source: the strategies of AutoDist (Zhang et al. 2020), whose names these are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping

from replicator import errors
from replicator.report import files as plan_files
from replicator.strategy import display, files
from replicator.strategy.nodes import Node
from replicator.strategy.trials import Trial
from replicator.variables.synchronizer import error


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How each variable is placed and kept equal on all replicas.

    Strategies are equal if their nodes and replicas are.

    Example:
        >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
        >>> made = replicator.strategy.Strategy((replicator.strategy.Node("w", ps),))
        >>> made.save("strategy.pb")
        >>> replicator.strategy.Strategy.load("strategy.pb") == made
        True

    Attributes:
        nodes: One per trainable variable.
        replicas: The full name of each replica's device.
        id: A digest of nodes and replicas, which identifies the strategy by content.
        path: Where it was saved or loaded from, if anywhere.
        trials: What `tune` has measured: this strategy, then the others.
    """

    nodes: tuple[Node, ...] = ()
    replicas: tuple[str, ...] = ()
    id: str = dataclasses.field(default="", compare=False)
    path: str = dataclasses.field(default="", compare=False)
    trials: tuple[Trial, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("nodes", "replicas", "trials"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        names = set()
        for node in self.nodes:
            if not isinstance(node, Node):
                raise error(
                    f"a Strategy was given the node {errors.repr_of(node)}.",
                    "pass objects of class Node.",
                )
            if node.name in names:
                raise error(
                    f"a Strategy has two nodes for variable {node.name}.",
                    "give each variable one node.",
                )
            names.add(node.name)
        if not all(isinstance(device, str) for device in self.replicas):
            raise error(
                f"a Strategy was given replicas={errors.repr_of(self.replicas)}.",
                "pass the names of their devices.",
            )
        if not all(isinstance(trial, Trial) for trial in self.trials):
            raise error(
                f"a Strategy was given trials={errors.repr_of(self.trials)}.",
                "pass objects of class Trial.",
            )
        if not self.id:
            content = repr((self.nodes, self.replicas)).encode(errors="replace")
            digest = hashlib.blake2b(content, digest_size=8).hexdigest()
            object.__setattr__(self, "id", digest)

    def node(self, name: str) -> Node | None:
        """Returns the node of a variable, or None.

        Example:
            >>> print(replicator.strategy.Strategy().node("dense/kernel"))
            None

        Args:
            name: The variable's path.
        """
        return self.by_name.get(name)

    @property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes, by the variables' paths.

        Example:
            >>> replicator.strategy.Strategy().by_name
            {}
        """
        return {node.name: node for node in self.nodes}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy to a file, in the format of its suffix.

        Example:
            >>> replicator.strategy.Strategy().save("strategy.json")

        Args:
            path: .json; with any other suffix the file is a binary protobuf of
                strategy.proto.

        Raises:
            StrategyError: The file cannot be written.
        """
        files.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Strategy:
        """Loads a strategy from a file.

        Example:
            >>> replicator.strategy.Strategy().save("strategy.pb")
            >>> replicator.strategy.Strategy.load("strategy.pb").nodes
            ()

        Args:
            path: As for `save`.

        Raises:
            StrategyError: There is no such file, or it does not hold a strategy.
        """
        return cls(**files.load(path))

    from_file = load

    def to_bytes(self) -> bytes:
        """Returns the strategy as a serialized protobuf of strategy.proto.

        Example:
            >>> len(replicator.strategy.Strategy().to_bytes()) > 0
            True
        """
        return files.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Strategy:
        """Parses a strategy from a serialized protobuf.

        Example:
            >>> empty = replicator.strategy.Strategy()
            >>> replicator.strategy.Strategy.from_bytes(empty.to_bytes()) == empty
            True

        Args:
            data: What `to_bytes` returned, or another program wrote.

        Raises:
            StrategyError: The bytes do not hold a strategy.
        """
        return cls(**files.from_bytes(data))

    def to_json(self) -> str:
        """Returns the strategy as JSON.

        Example:
            >>> json.loads(replicator.strategy.Strategy().to_json())["graph_config"]
            {}
        """
        return files.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """Parses a strategy from JSON.

        Example:
            >>> replicator.strategy.Strategy.from_json('{"id": "empty"}').id
            'empty'

        Args:
            text: What `to_json` returned, or JSON of its form.

        Raises:
            StrategyError: The text does not hold a strategy.
        """
        return cls(**files.from_json(text))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots devices as columns, and the variables on them as blocks by bytes.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable([1.0, 2.0])
            >>> repl.strategy.plot("strategy.svg")

        Args:
            path: A file name that ends in .png or .svg.

        Raises:
            ArgumentError: It has another suffix, or cannot be written.
            DependencyError: matplotlib is not installed.
        """
        plan_files.check_picture("a strategy", path)
        with plan_files.needing("matplotlib", "plot a strategy"):
            from replicator.strategy import picture  # needed only for pictures
        with plan_files.writing("a strategy cannot be plotted to", path):
            picture.draw(self, path)

    def __str__(self) -> str:
        return display.table(self)
