"""What the library needs of TensorFlow beyond its public API, each with its reason.

No other file imports `tensorflow.python` or touches an underscore of a TensorFlow
object. Each entry says why the public API does not do and what would replace it.
tests/_tf calls each of them, so that a new TensorFlow fails there, by name.

The library cannot do without what is in the files of this folder. What is in fast/ only
saves time or memory, and choice.py has what is in plain/ in its place where a
TensorFlow lacks what it needs.
"""

from replicator._tf.autograph import (
    call_converted,
    function_of,
    same_conversion,
)
from replicator._tf.callers import (
    applying_optimizer,
    asked_by_writer,
    builder,
    keras_loop,
    older_optimizer_asks,
    optimizer_is_summing,
    strategy_asked_by_library,
    v1_optimizer_applying,
    variable_of_slot,
)
from replicator._tf.choice import (
    Nodes,
    capture_all,
    import_nodes,
    is_step,
    leave_out_unused,
    pack_results,
    place_of_reads,
    prepare_call,
    read_quickly,
    replace_new_constant,
    trace,
    write_quickly,
)
from replicator._tf.cluster import (
    connect,
    connection,
    has_started,
)
from replicator._tf.control_flow import (
    compiled_function,
    cond,
    control_flow_context,
    in_loop_of,
    lower_in_place,
)
from replicator._tf.distribute import (
    CombinedContext,
    default_strategy,
    distribution_mode,
)
from replicator._tf.effects import (
    is_stateful,
    only_reads,
    ordered_branches,
    resources_touched,
    run_independently,
)
from replicator._tf.frames import (
    called_by_runtime,
    passed_user_code,
    stack_depth,
    stack_since,
    user_frames,
)
from replicator._tf.functions import (
    add_input,
    called_graphs,
    capture_at_call,
    capture_by_call,
    copy_functions,
    count_functions,
    finish_function,
    function_body,
    function_called,
    functions_called,
    new_function_graph,
    set_function,
)
from replicator._tf.graphs import (
    operation_count,
    seeds_counted,
    stands_in,
)
from replicator._tf.ops import (
    abandon,
    add_control_inputs,
    control_outputs,
    copy_handle_data,
    empty_constant,
    is_abandoned,
    move_control_outputs,
    replace,
    resource_shape,
    set_input,
    set_int_attr,
    set_read_only_inputs,
    set_text_attr,
)
from replicator._tf.python import (
    PythonFunction,
    mark_python_function,
    python_call,
    python_function,
    register_python_function,
)
from replicator._tf.state import (
    SaveableObject,
    SaveSpec,
    in_save_context,
    track,
)
from replicator._tf.tapes import (
    is_watched,
    record_gradient,
    stop_recording,
)
from replicator._tf.traces import (
    Traces,
    tracing_apart,
)
from replicator._tf.variables import (
    HandleVariable,
    ResourceVariable,
    UnliftableError,
    last_variable_creator,
    lift_initial_value,
)

__all__ = [
    "abandon",
    "add_control_inputs",
    "add_input",
    "applying_optimizer",
    "asked_by_writer",
    "builder",
    "older_optimizer_asks",
    "call_converted",
    "called_by_runtime",
    "called_graphs",
    "capture_all",
    "capture_at_call",
    "capture_by_call",
    "CombinedContext",
    "compiled_function",
    "cond",
    "connect",
    "connection",
    "control_flow_context",
    "control_outputs",
    "copy_functions",
    "copy_handle_data",
    "count_functions",
    "default_strategy",
    "distribution_mode",
    "empty_constant",
    "finish_function",
    "function_body",
    "function_called",
    "function_of",
    "functions_called",
    "HandleVariable",
    "has_started",
    "import_nodes",
    "in_loop_of",
    "in_save_context",
    "is_abandoned",
    "is_stateful",
    "is_step",
    "is_watched",
    "keras_loop",
    "last_variable_creator",
    "leave_out_unused",
    "lift_initial_value",
    "lower_in_place",
    "mark_python_function",
    "move_control_outputs",
    "new_function_graph",
    "Nodes",
    "only_reads",
    "operation_count",
    "optimizer_is_summing",
    "ordered_branches",
    "pack_results",
    "passed_user_code",
    "place_of_reads",
    "prepare_call",
    "python_call",
    "python_function",
    "PythonFunction",
    "read_quickly",
    "record_gradient",
    "register_python_function",
    "replace",
    "replace_new_constant",
    "resource_shape",
    "resources_touched",
    "ResourceVariable",
    "run_independently",
    "same_conversion",
    "SaveableObject",
    "SaveSpec",
    "seeds_counted",
    "set_function",
    "set_input",
    "set_int_attr",
    "set_read_only_inputs",
    "set_text_attr",
    "stack_depth",
    "stack_since",
    "stands_in",
    "stop_recording",
    "strategy_asked_by_library",
    "trace",
    "Traces",
    "tracing_apart",
    "track",
    "UnliftableError",
    "user_frames",
    "v1_optimizer_applying",
    "variable_of_slot",
    "write_quickly",
]
