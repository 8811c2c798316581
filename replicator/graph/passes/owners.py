# SPDX-License-Identifier: Apache-2.0
"""Variables that one replica owns and all replicas share: only the owner writes them.

While a step is built, each replica uses such a variable through an alias of its handle,
as if it had its own component: code that distinguishes replicas, or orders the effects
of one of them, need not know about sharing. Every replica also builds the same updates.
Then, of all replicas' n-th writes to a variable, only the owner's is kept; it replaces
the others in their replicas' programs, and the ops that compute their values are
pruned. So the optimizer's work and its slots are those of one device, and only the
owner needs to receive a reduced gradient.

Source: a parameter server per variable (Li et al. 2014, Scaling distributed machine
learning with the parameter server), as AutoDist compiles it into the graph (Zhang et
al. 2020), and the partitioned states of ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import choice, effects, functions, tapes
from replicator._tf import ops as tf_ops
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import chooses, kind_of, resource_inputs, touched
from replicator.graph.ir.placeholder import Call
from replicator.graph.order.effects import may_write
from replicator.graph.same.keys import Key, Keys
from replicator.world import World

WRITE = "assign"  # the primitive of a write in control flow, listed as a call


@dataclasses.dataclass(frozen=True)
class Shared:
    """A variable that one replica owns.

    Attributes:
        name: The variable's name.
        owner: The replica that owns it.
        variable: The variable itself.
    """

    name: str
    owner: int
    variable: Any = dataclasses.field(compare=False, repr=False)


class SeveralOwners(Exception):
    """Ops write variables of several owners, or of one and of none.

    Each such op can only run on one replica, or on all of them.

    Attributes:
        found: These ops, and the owned variables that each writes.
    """

    def __init__(self, found: Sequence[tuple[tf.Operation, list[Shared]]]) -> None:
        self.found = found
        super().__init__(", ".join(op.name for op, _ in found))


class Aliases:
    """The handles through which the replicas of one build use shared variables.

    Args:
        graph: The graph that the step is built into.
        world: All replicas, and which of them are built here.
        recorded: The result of `recorded` after earlier attempts at this build:
            functions that were traced then, and only once, still use those handles.

    Attributes:
        by_all: The ids of the handles that all replicas use, once these are resolved.
            Of a variable with copies, only the owner uses the handle.
    """

    def __init__(
        self,
        graph: tf.Graph,
        world: World,
        recorded: Mapping[int, Any] | None = None,
    ) -> None:
        self._graph = graph
        self._world = world
        self._aliases: dict[tuple[int, int], tf.Tensor] = {}
        self._variables: dict[int, Any] = {}
        self._recorded: dict[int, Any] = dict(recorded or {})
        self._captures = Captures()
        self.by_all: set[int] = set()

    def of(self, variable: Any, replica_id: int) -> tf.Tensor:
        """Returns the handle through which a replica uses an owned variable."""
        key = (id(variable.storage.first), replica_id)
        if key not in self._aliases:
            self.make([variable], [replica_id])
        return self._aliases[key]

    def make(self, variables: Sequence[Any], replica_ids: Sequence[int]) -> None:
        """Creates the handles of several owned variables, for several replicas.

        They are imported into the graph at once, which takes a fraction of the time of
        adding as many ops.
        """
        graph: Any = self._graph
        nodes = choice.Nodes()
        missing = []
        for variable in variables:
            handle = variable.storage.first.handle
            inside = graph.capture(handle) if graph.building_function else handle
            device = variable.placement.device(self._world)
            for r in replica_ids:
                if (id(variable.storage.first), r) not in self._aliases:
                    nodes.add("Identity", [inside], device, T=tf.resource)
                    missing.append((variable, r))
        if not missing:
            return
        with (
            graph.as_default(),
            graph.colocate_with(None, ignore_existing=True),
            tf.control_dependencies(None),
            tapes.stop_recording(),
        ):
            ops = nodes.finish("aliases")
        for (variable, r), op in zip(missing, ops, strict=True):
            alias = op.outputs[0]
            tf_ops.copy_handle_data(variable.storage.first.handle, alias)
            self._aliases[id(variable.storage.first), r] = alias
            self._variables[id(alias)] = variable

    def ops(self) -> set[tf.Operation]:
        """Returns the ops that create the aliases, which are not part of the step."""
        return {alias.op for alias in self._aliases.values()}

    def note(self, handle: tf.Tensor, variable: Any) -> None:
        """Records that a replica uses a variable through its component's handle.

        The variable may be one of another Replicator, on the same devices.
        """
        self._recorded[id(handle)] = variable

    def recorded(self) -> dict[int, Any]:
        """Returns the variable of each alias and recorded handle, by handle id."""
        return {**self._recorded, **self._variables}

    def variable(self, handle: tf.Tensor) -> Any | None:
        """Returns the variable of a handle in the step; None if it is unknown."""
        key = id(self._captures.outermost(handle))
        variable = self._variables.get(key)
        return self._recorded.get(key) if variable is None else variable

    def variables(self) -> dict[int, Any]:
        """Returns the variable of each alias, by the alias's id."""
        return self._variables

    def device_for(self, op: tf.Operation) -> str | None:
        """Returns the device on which an op can reach its shared variable, if any.

        Control flow and functions may run anywhere: the ops inside them are placed.
        """
        if not self._aliases or kind_of(op).calls:
            return None
        for _, tensor in resource_inputs(op):
            variable = self._variables.get(id(self._captures.outermost(tensor)))
            if variable is not None:
                return variable.placement.device(self._world)
        return None

    def label(self, labels: Keys) -> dict[Key, Shared]:
        """Gives all aliases of a variable the same label.

        Returns:
            The shared variable of each label.
        """
        label_of: dict[int, Key] = {}
        shared = {}
        for (key, _), alias in self._aliases.items():
            variable = self._variables[id(alias)]
            label = label_of.setdefault(key, labels.new())
            labels.set(alias, label)
            owner = variable.placement.owner
            shared[label] = Shared(variable.name, owner, variable)
        return shared

    def resolve(self) -> None:
        """Replaces the aliases by the variables' handles."""
        for alias in self._aliases.values():
            (handle,) = alias.op.inputs
            if not self._variables[id(alias)].placement.has_copies:
                self.by_all.add(id(handle))
            tf_ops.replace(alias, handle)
            tf_ops.abandon([alias.op])  # it is not part of the step


@dataclasses.dataclass(frozen=True)
class Handles:
    """Identifies shared variables among resources, on any level of the graph.

    Attributes:
        labels: Gives all resources that are one variable the same label.
        shared: The shared variable of each label.
        world: All replicas, and which of them are built here.
    """

    labels: Keys
    shared: Mapping[Key, Shared]
    world: World

    def written(self, op: tf.Operation) -> list[Key]:
        """Returns the labels of the shared variables that an op writes, each once."""
        if not self.shared or not may_write(op):
            return []
        label_of = self._touched(op.inputs)
        if not label_of:
            return []
        written = touched(op)[1]
        return list(dict.fromkeys(label_of[id_] for id_ in label_of if id_ in written))

    def writes_others(self, op: tf.Operation) -> bool:
        """Whether an op also writes resources that are not shared variables."""
        return bool(touched(op)[1] - set(self._touched(op.inputs)))

    def calls_inside(self, op: tf.Operation, replica_id: int) -> list[Call]:
        """Describes the writes inside control flow as calls, so that it is merged.

        Args:
            op: A conditional, a loop or a function call.
            replica_id: The replica to which the op belongs.
        """
        if not self.shared or not self._touched(op.inputs):
            return []
        counts: dict[Key, int] = {}
        calls = []
        for label, writer in self._writers(op, [self._label_of(t) for t in op.inputs]):
            number = counts[label] = counts.get(label, -1) + 1
            calls.append(
                Call(
                    primitive=WRITE,
                    options={"variable": self.shared[label].name},
                    replica_id=replica_id,
                    device=self.world.device(replica_id),
                    group=self.world.replica_ids,
                    key=f"w{label.digest.hex()}:{number}",
                    operands=(),
                    agreed=(),
                    line=errors.line_of(writer),
                )
            )
        return calls

    def _label_of(self, tensor: tf.Tensor) -> Key | None:
        """Returns the label of a shared variable's handle; None for another tensor."""
        if tensor.dtype != tf.resource:
            return None
        label = self.labels.of(tensor)
        return label if label in self.shared else None

    def _touched(self, tensors: Sequence[tf.Tensor]) -> dict[int, Key]:
        """Returns the labels of shared variables' handles, by the tensors' ids."""
        labels = {id(tensor): self._label_of(tensor) for tensor in tensors}
        return {key: label for key, label in labels.items() if label is not None}

    def _writers(
        self, op: tf.Operation, argument_labels: Sequence[Key | None]
    ) -> Iterator[tuple[Key, tf.Operation]]:
        """Yields (label, op) for each write inside an op, in order, at any depth."""
        count = _arguments(op, len(argument_labels))
        argument_labels = argument_labels[len(argument_labels) - count :]
        for _, body in functions.called_graphs(op):
            label_of = {
                id(tensor): label
                for tensor, label in zip(body.inputs, argument_labels, strict=False)
            }
            for inner in body.get_operations():
                labels = [label_of.get(id(tensor)) for tensor in inner.inputs]
                if kind_of(inner).calls:
                    if any(label is not None for label in labels):
                        yield from self._writers(inner, labels)
                elif may_write(inner):
                    written = effects.resources_touched(inner)[1]
                    for tensor, label in zip(inner.inputs, labels, strict=True):
                        if label is not None and id(tensor) in written:
                            yield label, inner


NOTHING_SHARED = Handles(Keys(), {}, World.single_process(()))


def _arguments(op: tf.Operation, count: int) -> int:
    """Returns how many of an op's inputs are passed to its functions: the last ones."""
    return count - 1 if chooses(op) else count


def keep_owners_writes(
    replicas: Sequence[Sequence[tf.Operation]],
    replica_ids: Sequence[int],
    handles: Handles,
    initializers: Set[tf.Operation],
) -> dict[tf.Operation, tf.Operation]:
    """Replaces the writes of all replicas by the owner's, on one level of the graph.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        replica_ids: The replicas.
        handles: Identifies shared variables among resources.
        initializers: Ops that initialize variables, which are not part of the step.

    Returns:
        The owner's write for each of the others, which are removed from the graph.

    Raises:
        MismatchError: A replica writes a variable more often than another.
        SeveralOwners: An op writes variables of several owners, or of one and of none.
    """
    if not handles.shared:
        return {}
    writes: dict[Key, list[list[tf.Operation]]] = {}
    for n, ops in enumerate(replicas):
        for op in ops:
            if op in initializers:
                continue
            for label in handles.written(op):
                columns = writes.setdefault(label, [[] for _ in replicas])
                columns[n].append(op)
    owner_write_of: dict[tf.Operation, tf.Operation] = {}
    several: dict[tf.Operation, list[Key]] = {}
    for label, columns in writes.items():
        shared = handles.shared[label]
        _check_count(shared, columns, replica_ids)
        for row in zip(*columns, strict=True):
            owner_write = row[list(replica_ids).index(shared.owner)]
            consistent = [
                owner_write_of.setdefault(op, owner_write) is owner_write for op in row
            ]
            merged = all(op is owner_write for op in row)
            if not all(consistent) or not merged and handles.writes_others(owner_write):
                several.update((op, handles.written(op)) for op in row)
    if several:
        _place_nowhere(several)
        raise SeveralOwners(
            [
                (op, [handles.shared[label] for label in labels])
                for op, labels in several.items()
            ]
        )
    others = {
        op: owner_write
        for op, owner_write in owner_write_of.items()
        if op is not owner_write
    }
    for op, owner_write in others.items():
        tf_ops.add_control_inputs(
            owner_write, [c for c in op.control_inputs if c is not owner_write]
        )
        tf_ops.move_control_outputs(op, owner_write)
    tf_ops.abandon(list(others))
    return others


def _place_nowhere(ops: Iterable[tf.Operation]) -> None:
    """Leaves ops that will not run one resource each, so that they can be placed."""
    for op in ops:
        resources = resource_inputs(op)
        for index, _ in resources:
            tf_ops.set_input(op, index, resources[0][1])


def _check_count(
    shared: Shared,
    columns: Sequence[Sequence[tf.Operation]],
    replica_ids: Sequence[int],
) -> None:
    counts = [len(column) for column in columns]
    if len(set(counts)) == 1:
        return
    most = columns[counts.index(max(counts))]
    extra = most[min(counts)]
    sites = [
        f"replica {r}: {len(column)} writes"
        for r, column in zip(replica_ids, columns, strict=True)
    ]
    raise errors.MismatchError(
        f"the replicas write variable {shared.name}, which replica {shared.owner} "
        "owns, different numbers of times.",
        [*sites, f"one of them writes it at {errors.line_of(extra)}"],
        'let every replica make the same assignments, or use variables="mirrored".',
    )
