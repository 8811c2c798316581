# SPDX-License-Identifier: Apache-2.0
"""Gives each replica its own traces of the user's tf.functions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_ops as _control_flow

from replicator._tf import callers


class TraceContext(_control_flow.XLAControlFlowContext):
    """Not an XLA context, but like some of these, it forces separate traces."""

    def __init__(self, traces: Traces) -> None:
        super().__init__()
        self._traces = traces

    def IsXLAContext(self) -> bool:
        return False

    def RequiresUniqueFunctionRetracing(self) -> bool:
        self._traces.record_cache()
        return True


class _SameDevice:
    """A device function that leaves ops where they are, but forces separate traces."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    def __call__(self, op: tf.Operation) -> str:
        return op.device

    def __hash__(self) -> int:
        self._traces.record_cache(by_id=False)
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Traces:
    """The traces that the user's tf.functions create for one build of a step.

    A tf.function keeps its traces, and they the graph of the build, for as long as it
    lives, although nobody can call them once the build is done. There is no public way
    to find or drop them.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, Any] = {}
        self._caches: dict[int, Any] = {}
        self._unknown = self._done = False

    def context(self, key: Any) -> TraceContext:
        """Returns the context that makes tf.functions trace separately for a key.

        For use in a function; see `device` for plain tf.Graphs.
        """
        return self._keys.setdefault(("context", key), TraceContext(self))

    def device(self, key: Any) -> _SameDevice:
        """Returns a device function with `context`'s effect in a plain tf.Graph."""
        return self._keys.setdefault(("device", key), _SameDevice(self))

    def record_cache(self, by_id: bool = True) -> None:
        """Records the cache of the tf.function that is looking for a trace.

        Args:
            by_id: Whether the trace will be identified by the id of this context alone.
        """
        max_frames = 0 if self._done else _ASKING_DEPTH
        for call in callers.calls(*_DEFINING, max_frames=max_frames):
            cache = call.values["tracing_options"].function_cache
            if cache is not None:
                self._caches[id(cache)] = cache
            return
        self._unknown |= by_id

    def forget(self) -> None:
        """Drops the traces; the graphs that call them hold what they need."""
        self._done = True
        contexts = set(map(id, self._keys.values()))
        for cache in self._caches.values():
            for context, type_ in list(cache._primary):
                key = context.context
                if key.xla_context_id in contexts or any(
                    id(function) in contexts for function in key.device_functions
                ):
                    # A collected trace would dismantle its graph, which is in use.
                    cache._primary[context, type_]._garbage_collector.release()
                    del cache._primary[context, type_]
                    cache._dispatch_dict.pop(context, None)
        if self._unknown:  # an unknown cache may hold the keys' ids: never reuse them
            _never_forgotten.append(self._keys)
        self._keys, self._caches = {}, {}


# What looks in the cache, and its module.
_DEFINING = (
    ("_maybe_define_function",),
    "tensorflow.python.eager.polymorphic_function.tracing_compilation",
)
_ASKING_DEPTH = 12  # frames from a context's method up to it


_never_forgotten: list[Any] = []


@contextlib.contextmanager
def separate_traces(
    graph: tf.Graph, key: Any, traces: Traces
) -> Iterator[Callable[[], None]]:
    """Traces the tf.functions that are called in this block separately for `key`.

    The rest of a tf.function's cache key, beside its arguments, is not public: in a
    tf.Graph it holds the device functions, in a function only the XLA context and the
    strategy.

    Args:
        graph: The default graph.
        key: Any hashable.
        traces: Where keys are unified, and the traces recorded for `forget`.

    Yields:
        A function; tf.functions called after it has been called are traced anew.
    """
    versions = itertools.count(1)
    if not graph.building_function:
        with graph.device(traces.device((key, 0))):
            entry = graph._device_function_stack.peek_top_obj()

            def anew_in_graph() -> None:
                entry.function = traces.device((key, next(versions)))

            yield anew_in_graph
        return
    start, context = graph.num_operations(), graph._get_control_flow_context()
    if context is not None:
        yield lambda: None
        return

    def anew() -> None:
        graph._set_control_flow_context(traces.context((key, next(versions))))

    graph._set_control_flow_context(traces.context((key, 0)))
    try:
        yield anew
    finally:
        graph._set_control_flow_context(None)
        # Automatic control dependencies would not order ops that are in a context.
        for op in graph.get_operations()[start:]:
            if isinstance(op._get_control_flow_context(), TraceContext):
                op._set_control_flow_context(None)
