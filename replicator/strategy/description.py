# SPDX-License-Identifier: Apache-2.0
"""Strategy: how each variable is kept equal on all replicas, as plain data.

One Node per trainable variable says where it is, in how many parts, and how its
gradient travels. Builders make them, compiled.py turns them into placements and
synchronizers, files.py writes and reads them.

Source: the strategies of AutoDist (Zhang et al. 2020), whose names these are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping

from replicator import errors
from replicator.plan import files as plan_files
from replicator.strategy import display, files
from replicator.strategy.nodes import Node, error
from replicator.strategy.trials import Trial


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How each variable is kept equal on all replicas.

    Two are equal if their nodes and devices are.

    Example:
        >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
        >>> made = replicator.strategy.Strategy((replicator.strategy.Node("w", ps),))
        >>> made.save("strategy.pb")
        >>> replicator.strategy.Strategy.load("strategy.pb") == made
        True

    Attributes:
        nodes: One for each trainable variable.
        replicas: The device of each replica, by its full name.
        id: Tells strategies apart, whatever they are called: a digest of the two.
        path: Where it was saved or loaded from, if it was.
        trials: What `tune` has measured of it, and then of others.
    """

    nodes: tuple[Node, ...] = ()
    replicas: tuple[str, ...] = ()
    id: str = dataclasses.field(default="", compare=False)
    path: str = dataclasses.field(default="", compare=False)
    trials: tuple[Trial, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("nodes", "replicas", "trials"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        seen = set()
        for node in self.nodes:
            if not isinstance(node, Node):
                raise error(
                    f"a Strategy was given the node {errors.shown(node)}.",
                    "its nodes are Nodes.",
                )
            if node.name in seen:
                raise error(
                    f"a Strategy has two nodes of variable {node.name}.",
                    "give each variable one.",
                )
            seen.add(node.name)
        if not all(isinstance(device, str) for device in self.replicas):
            raise error(
                f"a Strategy was given replicas={errors.shown(self.replicas)}.",
                "these are the names of their devices.",
            )
        if not all(isinstance(trial, Trial) for trial in self.trials):
            raise error(
                f"a Strategy was given trials={errors.shown(self.trials)}.",
                "they are Trials.",
            )
        if not self.id:
            said = repr((self.nodes, self.replicas)).encode(errors="replace")
            digest = hashlib.blake2b(said, digest_size=8).hexdigest()
            object.__setattr__(self, "id", digest)

    def node(self, name: str) -> Node | None:
        """Returns the node of a variable, if there is one.

        Example:
            >>> print(replicator.strategy.Strategy().node("dense/kernel"))
            None

        Args:
            name: The variable's path.
        """
        return self.by_name.get(name)

    @property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes, by the paths of the variables.

        Example:
            >>> replicator.strategy.Strategy().by_name
            {}
        """
        return {node.name: node for node in self.nodes}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy to a file, in the form that its suffix says.

        Example:
            >>> replicator.strategy.Strategy().save("strategy.json")

        Args:
            path: Ends in .json, .yml or .yaml, in .txt, .pbtxt or .textproto; else the
                file is a binary protobuf, that of strategy.proto.

        Raises:
            StrategyError: The file cannot be written.
        """
        files.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Strategy:
        """Returns the strategy that a file holds.

        Example:
            >>> replicator.strategy.Strategy().save("strategy.pb")
            >>> replicator.strategy.Strategy.load("strategy.pb").nodes
            ()

        Args:
            path: As for `save`.

        Raises:
            StrategyError: There is no such file, or no strategy in it.
        """
        return cls(**files.load(path))

    from_file = load

    def to_bytes(self) -> bytes:
        """Returns the strategy as a protobuf, that of strategy.proto.

        Example:
            >>> len(replicator.strategy.Strategy().to_bytes()) > 0
            True
        """
        return files.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Strategy:
        """Returns the strategy that a protobuf holds.

        Example:
            >>> empty = replicator.strategy.Strategy()
            >>> replicator.strategy.Strategy.from_bytes(empty.to_bytes()) == empty
            True

        Raises:
            StrategyError: It holds none.
        """
        return cls(**files.from_bytes(data))

    def to_text(self) -> str:
        """Returns the strategy in the text form of protobufs.

        Example:
            >>> "graph_config" in replicator.strategy.Strategy().to_text()
            True
        """
        return files.to_text(self)

    @classmethod
    def from_text(cls, text: str) -> Strategy:
        """Returns the strategy that a text form holds.

        Example:
            >>> text = 'node_config { var_name: "w" AllReduceSynchronizer {} }'
            >>> replicator.strategy.Strategy.from_text(text).node("w").synchronizer.spec
            'AUTO'

        Raises:
            StrategyError: It holds none.
        """
        return cls(**files.from_text(text))

    def to_json(self) -> str:
        """Returns the strategy as JSON.

        Example:
            >>> json.loads(replicator.strategy.Strategy().to_json())["graph_config"]
            {}
        """
        return files.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """Returns the strategy that JSON or YAML holds.

        Example:
            >>> replicator.strategy.Strategy.from_json('{"id": "empty"}').id
            'empty'

        Raises:
            StrategyError: It holds none.
        """
        return cls(**files.from_json(text))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws devices as columns, and what they have of variables as blocks by bytes.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable([1.0, 2.0])
            >>> repl.strategy.plot("strategy.svg")

        Args:
            path: A file name that ends in .png or .svg.

        Raises:
            ArgumentError: It ends otherwise, or cannot be written.
            DependencyError: matplotlib is not installed.
        """
        plan_files.check_picture("a strategy", path)
        with plan_files.needing("matplotlib", "plot a strategy"):
            from replicator.strategy import picture  # which tables do not need
        with plan_files.writing("a strategy cannot be plotted to", path):
            picture.draw(self, path)

    def __str__(self) -> str:
        return display.table(self)
