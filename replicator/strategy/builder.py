# SPDX-License-Identifier: Apache-2.0
"""Builder: derives a strategy from the facts of variables and devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from replicator import arguments, errors
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import error


class Builder:
    """Derives a strategy from facts of variables and devices: one rule per variable.

    A custom builder is a single method. It receives the variables in the order in which
    they are created and yields for each, before it requests the next, a `Node`, or None
    to create the variable as without a strategy.

    Each variable is then created where its node says. A builder that needs more facts
    to decide (the next variables, or `variable.sparse`: whether its gradient is) may
    simply request them. Its variables are then created as without a strategy; it
    decides on all of them, and they move, when the first step with their gradients is
    built.

    Example:
        >>> from replicator import strategy
        >>> class LargeOnServers(strategy.Builder):
        ...     '''Large ones are on CPUs in turn, all replicas have the others.'''
        ...     def __init__(self, nbytes=1 << 20):
        ...         self.nbytes = nbytes
        ...     def nodes(self, variables, resources):
        ...         servers, turn = resources.cpus, 0
        ...         for variable in variables:
        ...             if variable.nbytes < self.nbytes:
        ...                 group = variable.order // 64
        ...                 how = strategy.AllReduceSynchronizer(group=group)
        ...             else:
        ...                 how = strategy.PSSynchronizer(servers[turn % len(servers)])
        ...                 turn += 1
        ...             yield strategy.Node(variable.path, how)
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=LargeOnServers(nbytes=4096))
        >>> with repl.context():
        ...     table = tf.Variable(tf.zeros([1000, 4]), name="table")
        ...     scale = tf.Variable(1.0, name="scale")
        >>> [type(node.synchronizer).__name__ for node in repl.strategy.nodes]
        ['PSSynchronizer', 'AllReduceSynchronizer']

    Attributes:
        may_divide: Whether the builder may split variables into parts when it decides
            only at the first step: they are then created so that they can be split.
    """

    may_divide = False

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields a Node or None for each variable, in order.

        Example:
            >>> facts = replicator.strategy.VariableFacts("w", (2, 2), "float32")
            >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
            >>> (node,) = replicator.strategy.PS().nodes([facts], devices)
            >>> node.synchronizer.reduction_destination
            'CPU:0'

        Args:
            variables: The trainable floating variables, in the order of creation.
            resources: The devices.
        """
        raise error(
            f"{type(self).__name__} has no method `nodes`.",
            "define nodes(variables, resources), which yields a Node for each "
            "variable.",
        )

    def build(
        self, variables: Sequence[VariableFacts], resources: Resources
    ) -> Strategy:
        """Returns the strategy for variables whose facts are all known.

        Example:
            >>> facts = replicator.strategy.VariableFacts("w", (2, 2), "float32")
            >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
            >>> replicator.strategy.AllReduce().build([facts], devices).node("w").name
            'w'

        Args:
            variables: As for `nodes`.
            resources: As for `nodes`.
        """
        yielded = begun(self, iter(variables), resources)
        nodes = [following(self, facts, yielded) for facts in variables]
        return Strategy(
            tuple(node for node in nodes if node is not None), resources.devices
        )

    def missing(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the builder's entries that match no variable.

        Example:
            >>> replicator.strategy.PS().missing(["w"])
            ()

        Args:
            paths: The paths of all variables.
        """
        return ()

    def __repr__(self) -> str:
        options = [f"{name.strip('_')}={value!r}" for name, value in vars(self).items()]
        return f"{type(self).__name__}({', '.join(options)})"


_ENDED = object()
_YIELD = (
    "yield one Node(variable.path, ...) for each variable before asking for the next; "
    "or None, to leave it as it would be without a strategy."
)


def begun(
    builder: Builder, variables: Iterable[VariableFacts], resources: Resources
) -> Iterator[Any]:
    """Calls a builder's `nodes` and returns an iterator of what it yields.

    Raises:
        StrategyError: The method returns nothing to iterate over.
    """
    yielded: Any = builder.nodes(variables, resources)
    try:
        return iter(yielded)
    except TypeError:
        raise error(
            f"the method `nodes` of {type(builder).__name__} returns "
            f"{errors.repr_of(yielded)} instead of yielding nodes.",
            _YIELD,
        ) from None


def following(
    builder: Builder, facts: VariableFacts, yielded: Iterator[Any]
) -> Node | None:
    """Returns the node that a builder yields next, after checking that it fits.

    Raises:
        StrategyError: It yields nothing, or no node of this variable.
    """
    node = next(yielded, _ENDED)
    if node is None:
        return None
    if node is _ENDED:
        raise error(
            f"{type(builder).__name__} yields nothing for variable {facts.path}: its "
            "method `nodes` has ended.",
            _YIELD,
        )
    if not isinstance(node, Node) or node.name != facts.path:
        description = node.name if isinstance(node, Node) else errors.repr_of(node)
        raise error(
            f"{type(builder).__name__} yields {description} for variable {facts.path}.",
            _YIELD,
        )
    fit(node, facts)
    return node


def fit(node: Node, facts: VariableFacts) -> None:
    """Raises StrategyError unless a variable can be split as its node says."""
    if node.axis is None:
        return
    if node.axis >= len(facts.shape):
        raise error(
            f"variable {facts.path} is to be in parts along axis {node.axis}, but its "
            f"shape is {list(facts.shape)}.",
            "name an axis that it has, or give it a node without parts.",
        )
    node.extents(facts.shape[node.axis])


def check_chunks(who: Builder, chunk_size: Any) -> None:
    """Raises StrategyError unless `chunk_size` is a number of variables."""
    if not arguments.is_whole(chunk_size, 1):
        raise error(
            f"{type(who).__name__} was given chunk_size={errors.repr_of(chunk_size)}.",
            "pass how many variables travel together: an int of at least 1.",
        )
