"""Every private TensorFlow name that the library uses, each with its reason.

No other file imports `tensorflow.python` or touches an underscore of a TensorFlow
object. Each entry says why the public API does not do and what would replace it.
tests/test_tf.py calls each of them, so that a new TensorFlow fails there, by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.function import trace_type as _trace_type
from tensorflow.core.function.polymorphism import function_type as _function_type
from tensorflow.core.protobuf import config_pb2 as _config_pb2
from tensorflow.core.protobuf import rewriter_config_pb2 as _rewriter_pb2
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.client import pywrap_tf_session as _c_api
from tensorflow.python.distribute import distribute_lib as _distribute
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import execute as _execute
from tensorflow.python.eager import lift_to_graph as _lift
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic
from tensorflow.python.eager.polymorphic_function import concrete_function as _concrete
from tensorflow.python.framework import auto_control_deps as _acd
from tensorflow.python.framework import auto_control_deps_utils as _acd_utils
from tensorflow.python.framework import c_api_util as _c_api_util
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import importer as _importer
from tensorflow.python.framework import op_callbacks as _op_callbacks
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_ops as _control_flow
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_v2
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops import resource_variable_ops as _rvo
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    ControlFlowFuncGraph as _ControlFlowFuncGraph,
)
from tensorflow.python.saved_model import save_context as _save_context
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.util import tf_stack

# --- Rewiring -------------------------------------------------------------------------


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes `tensor` input `index` of `op`; no public call rewires a built op."""
    op._update_input(index, tensor)


def add_control_inputs(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Makes `op` run after `before`; tf.control_dependencies only reaches new ops."""
    if before:
        op._add_control_inputs(list(before))


def set_int_attr(op: tf.Operation, name: str, value: int) -> None:
    """Changes an integer attribute of a built op; the public API only reads them."""
    op._set_attr(name, attr_value_pb2.AttrValue(i=value))


def replace(old: tf.Tensor, new: tf.Tensor) -> None:
    """Points all consumers of a tensor at another one; see `set_input`."""
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                set_input(consumer, index, new)


def operation_count(graph: tf.Graph) -> int:
    """Returns the number of ops in a graph; `get_operations` would copy the list."""
    return graph.num_operations()


def control_flow_context(graph: tf.Graph) -> str | None:
    """Returns in which context ops are being added to `graph`: "v1", "xla" or None."""
    inside = graph._get_control_flow_context()
    while isinstance(inside, _Apart):
        inside = inside.outer_context
    if inside is None:
        return None
    return "xla" if inside.IsXLAContext() else "v1"


class _Apart(_control_flow.XLAControlFlowContext):
    """Asks for traces of its own, as some XLA contexts do, but is none."""

    def IsXLAContext(self) -> bool:
        return False

    def RequiresUniqueFunctionRetracing(self) -> bool:
        return True


_apart = functools.cache(lambda key: _Apart())  # for good: TensorFlow keeps its id()


@functools.cache
def _same_device(key: Any) -> Callable[[tf.Operation], str]:
    """Returns a device function that leaves ops where they are, one for each key."""
    return lambda op: op.device


@contextlib.contextmanager
def tracing_apart(graph: tf.Graph, key: Any) -> Iterator[Callable[[], None]]:
    """In this block, tf.functions that are called are traced for this `key`.

    What a tf.function keys its traces by, beside its arguments, is not open to the
    public: in a tf.Graph the device functions count, in a function only the XLA context
    and the strategy do.

    Yields:
        A function; what is called after a call of it is traced anew.
    """
    versions = itertools.count(1)
    if not graph.building_function:
        with graph.device(_same_device((key, 0))):
            entry = graph._device_function_stack.peek_top_obj()

            def anew_in_graph() -> None:
                entry.function = _same_device((key, next(versions)))

            yield anew_in_graph
        return
    start, outside = graph.num_operations(), graph._get_control_flow_context()
    if outside is not None:
        yield lambda: None
        return

    def anew() -> None:
        graph._set_control_flow_context(_apart((key, next(versions))))

    graph._set_control_flow_context(_apart((key, 0)))
    try:
        yield anew
    finally:
        graph._set_control_flow_context(None)
        # Automatic control dependencies would not order ops that stand in a context.
        for op in graph.get_operations()[start:]:
            if isinstance(op._get_control_flow_context(), _Apart):
                op._set_control_flow_context(None)


def called_graphs(op: tf.Operation) -> list[tuple[str, tf.Graph]]:
    """Returns (attribute, body) of each function that `op` calls, in a fixed order.

    Bodies are the Python FuncGraphs that were traced; functions that only exist in C++
    (loaded models, tf.data) are left out. There is no public way from op to body.
    """
    found = []
    # Backwards: TensorFlow traces cond before body and then_branch before else_branch.
    for name, value in sorted(op.node_def.attr.items(), reverse=True):
        names = [value.func.name] if value.HasField("func") else []
        names += [function.name for function in value.list.func]
        for function in names:
            body = getattr(op.graph._get_function(function), "graph", None)
            if body is not None:
                found.append((name, body))
    return found


def stands_in(graph: tf.Graph) -> bool:
    """Whether ops are being added to `graph`, or to a function inside of it.

    The graph around a function's is an attribute of FuncGraph, which is not public.
    """
    if tf.executing_eagerly():
        return False
    inside: Any = tf.compat.v1.get_default_graph()
    while inside is not None and inside is not graph:
        inside = getattr(inside, "outer_graph", None)
    return inside is not None


# --- Merging --------------------------------------------------------------------------


def new_function_graph(name: str) -> Any:
    """Returns an empty graph of a function that the default graph will call.

    `tf.function` would trace a Python function, order its effects across replicas and
    put identities around its results; the body of a merged op is put together as it is.
    """
    return _MergedGraph(f"{name}_{_ops.uid()}")


class _MergedGraph(tf.__internal__.FuncGraph):
    """A function graph out of which ops can be left.

    Ops cannot be removed from a graph, and those that have an effect would run.
    """

    def get_operations(self) -> list[tf.Operation]:
        """Returns the ops that the function consists of."""
        return [op for op in super().get_operations() if not is_abandoned(op)]


def add_input(graph: Any, like: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Adds an argument to a function graph, with what is known of `like`'s resource."""
    with graph.as_default(), tf.device(None):
        argument = tf.compat.v1.placeholder(like.dtype, shape)
    handle_data_util.copy_handle_data(like, argument)
    graph.inputs.append(argument)
    return argument


def finish_function(
    graph: Any, outputs: Sequence[tf.Tensor], must_run: Sequence[tf.Operation]
) -> str:
    """Makes a function of a graph, adds it to the outer graph and returns its name."""
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.control_outputs = list(must_run)
    return _control_flow_v2.create_new_tf_function(graph)


def function_body(
    op: tf.Operation, attribute: str, position: int = 0
) -> tuple[Any, list[tf.Tensor]]:
    """Returns the graph of a function that `op` calls, and its results.

    Gradients add results to the graphs of functions that exist already, at their ends.
    """
    value = op.node_def.attr[attribute]
    name = value.list.func[position].name if value.list.func else value.func.name
    found = function_called(op, name)
    assert found is not None, name
    return found


def functions_called(op: tf.Operation) -> list[tuple[str, int]]:
    """Returns (attribute, position) of what an op calls and TensorFlow runs as it is.

    Left out is what XLA compiles, and what only exists in C++.
    """
    found = []
    for attribute, value in sorted(op.node_def.attr.items()):
        names = [f.name for f in value.list.func]
        names += [value.func.name] if value.HasField("func") else []
        for position, name in enumerate(names):
            function = op.graph._get_function(name)
            compiled = function is not None and "_XlaMustCompile" in (
                function.cached_definition.attr
            )
            if getattr(function, "graph", None) is not None and not compiled:
                found.append((attribute, position))
    return found


def set_function(op: tf.Operation, attribute: str, position: int, name: str) -> None:
    """Lets `op` call another function, by its name, of the same arguments."""
    functions = op.node_def.attr[attribute].list.func
    names = [function.name for function in functions]
    if names:
        names[position] = name
        op._set_func_list_attr(attribute, names)
    else:
        op._set_func_attr(attribute, name)


def import_nodes(
    graph: tf.Graph, definition: Any, inputs: dict[str, tf.Tensor], scope: str
) -> list[tf.Operation]:
    """Adds the nodes of a GraphDef to a graph; returns their ops in order.

    `tf.graph_util.import_graph_def` copies the definition, fills in defaults and asks
    each new op for its colocation and the device functions, in Python: several times
    what the import itself takes.

    Args:
        graph: Where the nodes go.
        definition: Complete nodes, each behind its inputs, with their devices.
        inputs: By name, "x:0", what nodes are given that are not in the definition.
        scope: The name scope, with the final "/".
    """
    definition.versions.CopyFrom(graph.graph_def_versions)  # or it counts as very old
    options = _c_api_util.ScopedTFImportGraphDefOptions()
    _importer._PopulateTFImportGraphDefOptions(
        options.options, scope.removesuffix("/"), inputs, None, False
    )
    with graph._mutation_lock():
        buffer = _c_api.TF_NewBufferFromString(definition.SerializeToString())
        try:
            with graph._c_graph.get() as c_graph:
                results = _c_api.TF_GraphImportGraphDefWithResults(
                    c_graph, buffer, options.options
                )
            _c_api_util.ScopedTFImportGraphDefResults(results)
        finally:
            _c_api.TF_DeleteBuffer(buffer)
        return [
            graph._create_op_from_tf_operation(c_op, compute_device=False)
            for c_op in graph.new_operations()
        ]


class Nodes:
    """Ops that are added to the default graph at once, where that is quicker.

    An import takes a tenth of the time that adding ops by the public API takes, but
    goes through the whole graph once; so a few ops are added one by one, in half of
    the time, see `_add_op`. No tape records them. Apart from that they are as ops that
    are added otherwise: in the current name scope, under the device functions, control
    dependencies and control flow. Their names sort as they were noted.
    """

    def __init__(self) -> None:
        self._definition = tf.compat.v1.GraphDef()
        self._inputs: list[Sequence[tf.Tensor | int]] = []

    def add(
        self,
        type_: str,
        inputs: Sequence[tf.Tensor | int] = (),
        device: str | None = None,
        **attributes: Any,
    ) -> int:
        """Notes an op.

        Args:
            type_: Its type.
            inputs: Tensors, or the number of an op of this object for its first result.
            device: Where it stands; if given, no device function is asked.
            **attributes: All of the op's attributes, but for those with a default.

        Returns:
            The number of the op.
        """
        number = len(self._inputs)
        node = self._definition.node.add(op=type_, name=_node_name(number))
        node.device = device or ""
        for name, value in attributes.items():
            _set_attribute(node.attr[name], value)
        self._inputs.append(inputs)
        return number

    def finish(self, name: str) -> list[tf.Operation]:
        """Adds all ops, in a name scope; returns them by number."""
        graph = tf.compat.v1.get_default_graph()
        with tf.name_scope(name) as scope:
            if len(self._inputs) * _NODES_PER_OP < operation_count(graph):
                return self._add_one_by_one(graph)
            return self._import(graph, scope)

    def _add_one_by_one(self, graph: Any) -> list[tf.Operation]:
        ops: list[tf.Operation] = []
        for node, inputs in zip(self._definition.node, self._inputs, strict=True):
            tensors = [ops[x].outputs[0] if isinstance(x, int) else x for x in inputs]
            op = _add_op(node.op, tensors, node.attr, node.name, not node.device)
            if node.device:
                op._set_device(node.device)
            ops.append(op)
        return ops

    def _import(self, graph: Any, scope: str) -> list[tf.Operation]:
        given: dict[str, tf.Tensor] = {}
        for node, inputs in zip(self._definition.node, self._inputs, strict=True):
            for x in inputs:
                if isinstance(x, int):
                    node.input.append(f"{_node_name(x)}:0")
                    continue
                name = f"given_{id(x)}:{x.value_index}"
                node.input.append(name)
                if name not in given:
                    given[name] = graph.capture(x) if graph.building_function else x
        ops = import_nodes(graph, self._definition, given, scope)
        by_name = {op.name: op for op in ops}
        made = [by_name[scope + node.name] for node in self._definition.node]
        before = graph._current_control_dependencies()
        inside = graph._get_control_flow_context() is not None
        for op in made:
            if not op.device:
                graph._apply_device_functions(op)
            if before or inside:
                add_control_inputs(op, list(before))
                op._control_flow_post_processing()
        return made


# An import looks at so many nodes of the graph in the time of adding an op: measured.
_NODES_PER_OP = 1000


def _node_name(number: int) -> str:
    return f"n{number:07d}"


def _type_attribute(dtype: tf.DType) -> Any:
    return attr_value_pb2.AttrValue(type=dtype.as_datatype_enum)


def _set_attribute(attribute: Any, value: Any) -> None:
    """Sets the AttrValue of a node."""
    if isinstance(value, tf.DType):
        attribute.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attribute.shape.SetInParent()  # a scalar's is empty
        attribute.shape.MergeFrom(value.as_proto())
    elif isinstance(value, int):
        attribute.i = value
    else:
        attribute.tensor.CopyFrom(value)


def _add_op(
    type_: str,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, Any],
    name: str | None = None,
    ask_device: bool = True,
) -> tf.Operation:
    """Adds an op to the default graph, of which all attributes are known.

    The public calls find them out by the op's definition, which takes as long again.

    Args:
        type_: Its type.
        inputs: Its inputs, in order.
        attributes: AttrValues of all attributes without a default.
        name: What it is called.
        ask_device: Whether the device functions say where it stands.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal(
        type_,
        list(inputs),
        name=name,
        attrs=dict(attributes),
        compute_device=ask_device,
    )


def function_called(op: tf.Operation, name: str) -> tuple[Any, list[tf.Tensor]] | None:
    """Returns the graph of a function that `op` calls by name, and its results.

    None if the function only exists in C++.
    """
    function = op.graph._get_function(name)
    if getattr(function, "graph", None) is None:
        return None
    count = len(function.function_type.flat_outputs)
    return function.graph, function.graph.outputs[:count]


def copy_functions(source: Any, target: tf.Graph) -> None:
    """Makes the functions that ops of one graph call known to another."""
    for function in list(source._functions.values()):
        target._add_function_recursive(function)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Tells `target`, a resource or a variant, the shapes that `source` knows of."""
    handle_data_util.copy_handle_data(source, target)


def set_read_only_inputs(op: tf.Operation, indices: Sequence[int]) -> None:
    """Says which resources `op` only reads; control flow ops say so in an attribute."""
    _ops.set_int_list_attr(op, _acd_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, list(indices))


def lower_in_place(op: tf.Operation) -> None:
    """Lets the runtime take a conditional or a loop apart, as TensorFlow's own are."""
    _control_flow_v2.maybe_set_lowering_attr(op)


def control_outputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that wait for `op`; the public API only has what it waits for."""
    return list(op._control_outputs)


def move_control_outputs(old: tf.Operation, new: tf.Operation) -> None:
    """Makes what runs after `old` run after `new` instead."""
    for consumer in list(old._control_outputs):
        kept = [op for op in consumer.control_inputs if op is not old]
        consumer._remove_all_control_inputs()
        consumer._add_control_inputs([*kept, new])


# --- Effects: what must run, and in which order ---------------------------------------


def is_stateful(op: tf.Operation) -> bool:
    """Whether TensorFlow's automatic control dependencies would make `op` run."""
    return bool(_acd.op_is_stateful(op))


def only_reads(op: tf.Operation) -> bool:
    """Whether `op` leaves the variables that it is given as they are."""
    return op.type in _acd_utils.RESOURCE_READ_OPS


def resources_touched(op: tf.Operation) -> tuple[set[int], set[int]]:
    """Returns the ids of the resource tensors that `op` reads, and that it writes."""
    reads, writes = _acd_utils.get_read_write_resource_inputs(op)
    return {id(t) for t in reads}, {id(t) for t in writes}


def run_independently(graph: tf.Graph, op: tf.Operation) -> None:
    """Takes `op` out of the automatic order of the function being traced.

    TensorFlow chains all stateful ops that touch no resource in the order of creation,
    across replicas too. `experimental_acd_manager` is its hook against that.
    """
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


@contextlib.contextmanager
def ordered_branches(graph: tf.Graph) -> Iterator[None]:
    """In this block, conditionals and loops of a plain tf.Graph keep their effects.

    Their bodies run what nothing fetches only if the graph around them orders effects,
    as a tf.function does. There is no public way to ask for it in a tf.Graph.
    """
    before = graph._add_control_dependencies
    graph._add_control_dependencies = True
    try:
        yield
    finally:
        graph._add_control_dependencies = before


class _Abandoned:
    """Looks like a while loop's context, whose ops automatic control leaves alone."""

    outer_context = None

    def IsWhileContext(self) -> bool:
        return True


def is_abandoned(op: tf.Operation) -> bool:
    """Whether `abandon` was called for an op."""
    return isinstance(op._get_control_flow_context(), _Abandoned)


def abandon(ops: Sequence[tf.Operation]) -> None:
    """Makes sure that no function runs `ops` for their effects.

    Ops cannot be removed from a graph. What nothing fetches is pruned, unless automatic
    control dependencies make it run; they skip ops inside (v1) while loops.
    """
    for op in ops:
        op._set_control_flow_context(_Abandoned())


# --- Tracing and calling --------------------------------------------------------------


class _Effects(_acd.AutomaticControlDependencies):
    """Leaves what to do about effects to a function that is given."""

    def __init__(self, order: Callable[..., list[tf.Operation]]) -> None:
        super().__init__()
        self._order = order
        self._n_operations: int

    def __exit__(self, *about: Any) -> None:
        ops = self._graph.get_operations()[self._n_operations :]
        self._n_operations += len(ops)  # none is left for TensorFlow
        super().__exit__(*about)
        if about[0] is None:
            kept = [op for op in ops if not is_abandoned(op)]
            must_run = self._order(kept, set(self._independent_ops))
            self.ops_which_must_run.update(must_run)


def trace(
    build: Callable[[], Any],
    order: Callable[[Sequence[tf.Operation], set[tf.Operation]], list[tf.Operation]],
) -> Any:
    """Traces a function without arguments; returns its ConcreteFunction.

    Unlike those of a tf.function, its results do not wait for its effects, which would
    take them through one device after the other once the step is done. A call waits for
    all of them anyway. What a tf.function does about effects is open to the public only
    as a whole, and takes longer than all of Replicator's passes; and it takes all ops
    of its graph into the function, used or not.

    Args:
        build: Adds the ops; returns the results.
        order: Puts the effects among all ops in order, but for those that were said to
            run independently; returns the ops that must run.
    """

    def traced() -> Any:
        with _Effects(order) as effects:
            returned = build()
        graph.control_outputs.extend(effects.ops_which_must_run)
        graph.collective_manager_ids_used = effects.collective_manager_ids_used
        return returned

    graph = _StepGraph("step")
    _func_graph.func_graph_from_py_func(
        graph.name, traced, (), {}, func_graph=graph, add_control_dependencies=False
    )
    leave_out_unused(graph)
    returned = _trace_type.from_value(
        graph.structured_outputs, _trace_type.InternalTracingContext()
    )
    type_ = _function_type.FunctionType(
        (), graph.function_captures.capture_types, return_annotation=returned
    )
    return _concrete.ConcreteFunction.from_func_graph(
        graph, type_, {}, shared_func_graph=False
    )


class _StepGraph(tf.__internal__.FuncGraph):
    """A function graph out of which ops can be left when it is complete."""

    used: Sequence[tf.Operation] | None = None

    def get_operations(self) -> list[tf.Operation]:
        """Returns the ops that the function consists of."""
        return super().get_operations() if self.used is None else list(self.used)


def leave_out_unused(graph: Any) -> None:
    """Leaves out ops that no result and no effect of a function needs, if some must be.

    Where replicas share variables, each has built all updates, and only one of the
    results is used: TensorFlow would do much for each op before it leaves them out.
    Where none was abandoned, going through all of them takes more than it saves.

    Args:
        graph: That of a step, complete.
    """
    ops = graph.get_operations()
    if not any(map(is_abandoned, ops)):
        return
    stack = [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]
    used = {*stack, *(tensor.op for tensor in graph.inputs)}
    while stack:
        op = stack.pop()
        for source in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if source not in used:
                used.add(source)
                stack.append(source)
    graph.used = [op for op in ops if op in used]


def prepare_call(function: Any, only_cpus: bool = False) -> Callable[[], Any]:
    """Returns what runs a ConcreteFunction without arguments, eagerly, on no tape.

    Its own call binds arguments, asks all tapes about all captured tensors and packs
    the results by their types, which takes longer than a small step. None of this can
    differ from call to call here. What TensorFlow adds to an error is kept.

    Args:
        function: A ConcreteFunction.
        only_cpus: Whether all of its ops run on CPUs.

    Returns:
        A function that returns the flat results, in a list.
    """
    inference = function.inference_fn
    outputs = inference.function_type.flat_outputs
    name, count = inference.name.decode(), len(outputs)
    handles = [
        (index, known.shape_inference)
        for index, known in enumerate(spec.dtype._handle_data for spec in outputs)
        if known is not None
    ]
    runtime, options = _context.context(), _call_options(only_cpus)
    later = bool(function.graph.deferred_external_captures)
    captured = [] if later else function.captured_inputs

    def call() -> Any:
        inputs = function.captured_inputs if later else captured
        with (
            tf.profiler.experimental.Trace(function.graph.name),
            _atomic.InterpolateRuntimeError(inference),
        ):
            cancels = _cancellation.context()
            if cancels is None:
                results = _execute.execute(name, count, inputs, options, runtime)
            else:
                results = _execute.execute_with_cancellation(
                    name, count, inputs, options, runtime, cancels
                )
        for index, known in handles:
            handle_data_util.set_handle_data(results[index], known)
        return results or []

    return call


def _call_options(only_cpus: bool) -> tuple[Any, ...]:
    """Returns the attributes of a call, with less of what the first one waits for.

    TensorFlow goes over each function twice with about a dozen optimizers, most of
    which find nothing to do in a step of many replicas. Left out are the second time,
    where nothing was found; the optimizers by MLIR, which sort out control flow; and on
    CPUs, those that lay out images and move tensors for GPUs. The public settings hold
    for the whole process, do not offer these, and come first where they do.
    """
    runtime = _context.context()
    config = _config_pb2.ConfigProto()
    config.ParseFromString(runtime.function_call_options.as_attrs()["config_proto"])
    rewriter = config.graph_options.rewrite_options
    choice = _rewriter_pb2.RewriterConfig
    rewriter.meta_optimizer_iterations = choice.ONE
    rewriter.disable_tfg_optimizer = True
    if only_cpus and rewriter.layout_optimizer == choice.DEFAULT:
        rewriter.layout_optimizer = choice.OFF
        rewriter.memory_optimization = choice.NO_MEM_OPT
    executor = runtime.function_call_options.executor_type or ""
    settings = config.SerializeToString(deterministic=True)
    return "executor_type", executor, "config_proto", settings


def pack_results(function: Any, flat: Sequence[tf.Tensor]) -> Any:
    """Makes of flat results what the Python function of a ConcreteFunction returned."""
    return function.function_type.pack_output(flat)


# --- Gradients ------------------------------------------------------------------------


def record_gradient(
    name: str,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., Any],
) -> None:
    """Tells all tapes how to differentiate outputs by inputs.

    `tf.custom_gradient` does the same but adds an IdentityN that holds the operands.
    """
    record.record_operation(name, list(outputs), list(inputs), backward)


def place_of_reads() -> tuple[Any, Any] | None:
    """Returns what is equal where a variable, read twice, need not be read again.

    None where a tape may record what is added, or ops are made to wait for others. What
    is recorded and waited for, the public API only tells of one tape and of ops.
    """
    graph = tf.compat.v1.get_default_graph()
    if record.could_possibly_record() or graph._current_control_dependencies():
        return None
    return graph, graph._get_control_flow_context()


def stop_recording() -> Any:
    """In this block no tape records; the public call stops one tape only."""
    return record.stop_recording()


# --- Functions that XLA compiles ------------------------------------------------------


def compiled_function(graph: Any, outermost: tf.Graph) -> Any:
    """Returns the function that ops of `graph` belong to, if XLA compiles it.

    Such a function is traced once for all keys of `tracing_apart`: what counts is the
    innermost XLA context, and each call makes a new one that asks for no trace.

    Args:
        graph: Where ops are being added; it may be a branch or the body of a loop.
        outermost: A graph around it, as far as it is of interest.

    Returns:
        The function's graph, inside `outermost`, or None.
    """
    function = graph
    while function is not outermost and isinstance(function, _ControlFlowFuncGraph):
        function = function.outer_graph
    around = function
    while around is not None and around is not outermost:
        around = getattr(around, "outer_graph", None)
        if around is not None and control_flow_context(around) == "xla":
            return function
    return None


def capture_all(graph: Any, handles: Sequence[tf.Tensor]) -> None:
    """Makes eager resources known to a function graph, before anything uses them.

    The graph would capture each when it is used first, in several times the time. It
    says what it has captured, but cannot be told.
    """
    captures = graph._function_captures
    new = [t for t in handles if id(t) not in captures.by_val_internal]
    nodes = Nodes()
    for handle in new:
        nodes.add("Placeholder", dtype=handle.dtype, shape=handle.shape)
    with graph.as_default(), tf.control_dependencies(None):
        ops = nodes.finish("captured") if new else []
    for handle, op in zip(new, ops, strict=True):
        (inside,) = op.outputs
        handle_data_util.copy_handle_data(handle, inside)
        captures.add_or_replace(
            key=id(handle), external=handle, internal=inside, is_by_ref=False
        )
        graph.inputs.append(inside)


def capture_by_call(
    graph: Any, key: str, like: tf.Tensor, closure: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Returns the resource that `closure` gives whenever the function is called.

    `FuncGraph.capture_call_time_value` would ask it when the outermost function is
    called, and not where this one is called in the graph of another.

    Args:
        graph: The graph of the function, which is being traced.
        key: Tells its captures apart.
        like: Such a resource.
        closure: Called for each call, in the graph around.
    """
    captures = graph._function_captures
    if key not in captures.by_ref_internal:
        with graph.as_default(), tf.device(None), tf.control_dependencies(None):
            inside = tf.compat.v1.placeholder(tf.resource, [])
        handle_data_util.copy_handle_data(like, inside)
        captures.add_or_replace(
            key=key,
            external=closure,
            internal=inside,
            tracetype=tf.TensorSpec([], tf.resource),
            is_by_ref=True,
        )
    return captures.by_ref_internal[key]


# --- The user's code ------------------------------------------------------------------

_LIBRARIES = tuple(
    os.sep + name + os.sep
    for name in ("tensorflow", "keras", "tf_keras", "sonnet", "tree", "optree")
)
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_GENERATED = "__autograph_generated_file"
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_library(filename: str) -> bool:
    if filename.startswith((_HERE, "<")) or _GENERATED in filename:
        return True
    packages = "site-packages" + os.sep
    if packages in filename:
        return filename.partition(packages[:-1])[2].startswith(_LIBRARIES)
    return filename.startswith(_STANDARD)


def user_frames(
    of: tf.Operation | BaseException | None = None,
) -> list[tuple[str, int, str]]:
    """Returns (file, line, function) of the user's frames, outermost first.

    Of the frames that made an op or that an exception has left, or of those running
    now. `traceback.extract_stack` would show the files that autograph generates;
    TensorFlow's own stack maps them back to what the user wrote. Of an exception's
    frames, they are left out.
    """
    frames: Any
    if isinstance(of, BaseException):
        frames = traceback.extract_tb(of.__traceback__)
    else:
        frames = tf_stack.extract_stack() if of is None else of.traceback or ()
    return [
        (frame.filename, frame.lineno, frame.name)
        for frame in frames
        if not _is_library(frame.filename)
    ]


def variable_of_slot() -> Any:
    """Returns the variable for which an optimizer is creating a slot now, or None.

    Those of all families start from a function that is given the variable: Keras'
    add_variable_from_reference, tf.compat.v1's create_slot, Sonnet's variable_like.
    What they hand on to the creation of the slot does not say which variable it is.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_SLOT_DEPTH):
        if frame is None:
            return None
        argument = _SLOT_MAKERS.get(frame.f_code.co_name.removeprefix("tf__"))
        if argument in frame.f_locals:
            return frame.f_locals[argument]
        frame = frame.f_back
    return None


_SLOT_DEPTH = 40  # frames; autograph and variable creators stand in between
_SLOT_MAKERS = {
    "add_variable_from_reference": "reference_variable",
    "create_slot": "primary",
    "create_slot_with_initializer": "primary",
    "variable_like": "inputs",
}


def v1_optimizer_applying() -> bool:
    """Whether the caller is called by a v1 optimizer's `apply_gradients`, closely."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_V1_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "apply_gradients" and (
            frame.f_globals.get("__name__") == "tensorflow.python.training.optimizer"
        ):
            return True
        frame = frame.f_back
    return False


_V1_DEPTH = 8  # frames from apply_gradients to the variable's handle, and some more


def stack_depth() -> int:
    """Returns the depth of the Python stack, for `stack_since`."""
    return len(_countable_frames())


def stack_since(depth: int) -> tuple[tuple[str, int], ...]:
    """Returns (file, line) of all deeper frames, as the user wrote them."""
    return tuple((f.filename, f.lineno) for f in _countable_frames()[depth:])


def _countable_frames() -> list[Any]:
    """Returns all frames but this file's, and autograph's, hidden by converted code."""
    hidden = (__file__, autograph_api.__file__)
    return [frame for frame in tf_stack.extract_stack() if frame.filename not in hidden]


_OPTIMIZERS = ("keras.src.optimizers", "sonnet.src.optimizers")


def applying_optimizer() -> str | None:
    """Returns the class of the Keras or Sonnet optimizer whose `apply` is running."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Autograph converts Sonnet's methods, and puts "tf__" before their names.
        name = frame.f_code.co_name.removeprefix("tf__")
        owner = type(frame.f_locals.get("self"))
        if name in ("apply", "apply_gradients") and any(
            base.__module__.startswith(_OPTIMIZERS) for base in owner.__mro__
        ):
            return owner.__name__
        frame = frame.f_back
    return None


def call_converted(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls a user's function through autograph, as tf.function does.

    `tf.autograph.to_graph` converts too, but keeps no source map, and TensorFlow's
    wrappers replace the user's exceptions by others; here they pass unchanged.
    """
    # Without optional features, as tf.function: one of them orders ops by itself, and
    # would switch off the order of the function around.
    options = converter.ConversionOptions(
        recursive=True, user_requested=True, optional_features=()
    )
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
        try:
            return autograph_api.converted_call(
                function, tuple(args), None, None, options
            )
        except Exception as error:
            if hasattr(error, "ag_error_metadata"):
                del error.ag_error_metadata
            raise


# --- tf.distribute --------------------------------------------------------------------


def default_strategy() -> Any:
    """Returns the strategy of code that runs under none.

    `tf.distribute.get_strategy()` returns that of the scope around, if there is one.
    """
    return _distribute._get_default_strategy()


@contextlib.contextmanager
def distribution_mode(replica: Any = None, cross_replica: Any = None) -> Iterator[None]:
    """In this block, tf.distribute answers as told, under the default strategy.

    Entering a strategy's scope, or a ReplicaContext, also changes what variables are
    created, and what summaries are written.

    Args:
        replica: What `get_replica_context()` returns.
        cross_replica: The strategy of a cross-replica context, where it returns None.
            With neither: as outside of all scopes.
    """
    if replica is None and cross_replica is None:
        mode = _distribute._get_default_replica_mode()
    else:
        mode = _distribute._ThreadMode(default_strategy(), cross_replica, replica)
    stack = _ops.get_default_graph()._distribution_strategy_stack
    stack.append(mode)
    try:
        yield
    finally:
        stack.pop()


class CombinedContext(tf.distribute.ReplicaContext):
    """For optimizers whose gradients are combined already: sums them over one replica.

    The one that answers outside of all strategies does so too, by two ops for each.
    """

    def __init__(self) -> None:
        super().__init__(default_strategy(), 0)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value."""
        return value


# --- Variables ------------------------------------------------------------------------

ResourceVariable = (
    _rvo.ResourceVariable
)  # tf.Variable(...) asks the creator scopes again
UnliftableError = _lift.UnliftableError


class HandleVariable(tf.Variable, tf.__internal__.types.Tensor):
    """All that a resource variable can do by its handle, without its type.

    The v1 Saver assigns the single handle behind whatever *is a* BaseResourceVariable,
    and asks everything else how it wants to be saved and restored. A variable of
    several components needs to be asked, so it borrows the methods and not the class.
    """

    _should_act_as_resource_variable = True
    locals().update(
        {
            name: member
            for name, member in vars(_rvo.BaseResourceVariable).items()
            if name
            not in ("__init__", "__dict__", "__weakref__", "__doc__", "__module__")
            and not name.startswith("_abc")
        }
    )

    def __init__(self, like: Any, **facts: Any) -> None:
        """Takes over shape, dtype, names and so on from `like`, a resource variable."""
        with tf.init_scope():
            _rvo.BaseResourceVariable.__init__(
                self,
                shape=like.shape,
                dtype=like.dtype,
                handle=like.handle,
                name=like.name,
                unique_id=like._unique_id,
                handle_name=like._handle_name.removesuffix(":0"),
                graph_element=like._graph_element,
                initial_value=like._initial_value,
                is_initialized_op=like._is_initialized_op,
                save_slice_info=None,
                in_graph_mode=like._in_graph_mode,
                validate_shape=like._validate_shape,
                **facts,
            )
            self._maybe_initialize_trackable()


_WRITERS = {
    "assign": "AssignVariableOp",
    "assign_add": "AssignAddVariableOp",
    "assign_sub": "AssignSubVariableOp",
}


def adds_quickly(variable: Any) -> bool:
    """Whether `read_quickly` and `write_quickly` do what a variable's own methods do.

    Not where nothing is traced, nor where a debugger sees each op as it is added.
    """
    graph = tf.compat.v1.get_default_graph()
    cached = getattr(variable, "_caching_device", None) is not None
    return (
        graph.building_function
        and not cached
        and not _op_callbacks.should_invoke_op_callbacks()
    )


def read_quickly(variable: Any) -> tf.Tensor:
    """Adds a read of a variable to the function graph that is being traced.

    TensorFlow's own method looks at the definition of the op at each call, which takes
    twice as long. Steps read and write hundreds of variables on each replica.
    """
    _rvo.variable_accessed(variable)
    variable._variable_read = True
    handle, dtype = variable.handle, variable.dtype
    op = _add_op("ReadVariableOp", [handle], {"dtype": _type_attribute(dtype)})
    (value,) = op.outputs
    if _execute.must_record_gradient():  # forward accumulators use this record
        attributes = ("dtype", dtype.as_datatype_enum)
        _execute.record_gradient(op.type, op.inputs, attributes, [value])
    _rvo._maybe_set_handle_data(dtype, handle, value)
    record.record_operation(
        "ReadVariableOp", [value], [handle], _read_differentiated, _read_differentiated
    )
    return value


def _read_differentiated(gradient: tf.Tensor) -> list[tf.Tensor]:
    return [gradient]


def write_quickly(
    variable: Any, method: str, value: Any, name: str | None
) -> tf.Operation | None:
    """Adds an assignment to a variable to the function graph that is being traced.

    Args:
        variable: Is written.
        method: "assign", "assign_add" or "assign_sub".
        value: Is assigned, added or subtracted.
        name: Of the op.

    Returns:
        None if the shapes do not fit; the variable's own method says how.
    """
    tensor = tf.convert_to_tensor(value, variable.dtype)
    handle, type_ = variable.handle, _WRITERS[method]
    attributes = {"dtype": _type_attribute(variable.dtype)}
    if method == "assign":
        if not variable.shape.is_compatible_with(tensor.shape):
            return None
        known = variable._validate_shape and variable.shape.is_fully_defined()
        attributes["validate_shape"] = attr_value_pb2.AttrValue(b=known)
    return _add_op(type_, [handle, tensor], attributes, name)


def in_save_context() -> bool:
    """Whether a SavedModel is being made, in whose functions variables are plain."""
    return bool(_save_context.in_save_context())


def lift_initial_value(value: tf.Tensor) -> tf.Tensor:
    """Evaluates a tensor of the function being traced outside of it.

    Raises:
        UnliftableError: The tensor depends on the function's arguments or state.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            lifted = tf.compat.v1.wrap_function(lambda: None, [])
            graph = lifted.graph
            with graph.as_default():
                copy = _lift.lift_to_graph([value], graph)[value]
            return lifted.prune([], copy)()
        graph = _ops.get_default_graph()
        return _lift.lift_to_graph([value], graph)[value]


SaveableObject = saveable_object.SaveableObject  # the v1 Saver's idea of "how to save"
SaveSpec = saveable_object.SaveSpec


def restart_iterator(dataset: tf.data.Dataset, iterator: Any) -> None:
    """Starts an eager iterator over; the public API only makes new ones.

    A traced step has captured the iterator's resource, which therefore has to stay.
    """
    tf.raw_ops.MakeIterator(
        dataset=dataset._variant_tensor, iterator=iterator._iterator_resource
    )


def function_of(candidate: Any) -> Callable[..., Any]:
    """Returns the Python function inside a tf.function, or the candidate itself."""
    if isinstance(candidate, tf.types.experimental.PolymorphicFunction):
        return candidate.python_function
    return candidate
