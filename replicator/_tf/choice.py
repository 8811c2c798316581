# SPDX-License-Identifier: Apache-2.0
"""Chooses between each module of fast/ and its namesake in plain/.

The one in fast/ saves time or memory, and needs more of private TensorFlow. It is
chosen unless this TensorFlow lacks a name that it looks up on import, or the
environment variable REPLICATOR_FAST is 0 at that time, by which tests exercise the
other one.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from absl import logging

FILES = ("calls", "captures", "constants", "nodes", "tracing", "variables")
FAST: set[str] = set()  # the modules of fast/ in use


def choose(file: str) -> ModuleType:
    """Imports a module of fast/, or its namesake in plain/; updates FAST."""
    if os.environ.get("REPLICATOR_FAST") != "0":
        try:
            module = importlib.import_module(f"replicator._tf.fast.{file}")
        except (ImportError, AttributeError) as error:
            logging.warning(
                "This TensorFlow lacks what replicator/_tf/fast/%s.py needs (%s): "
                "steps take longer, with replicator/_tf/plain/%s.py.",
                file,
                error,
                file,
            )
        else:
            FAST.add(file)
            return module
    FAST.discard(file)
    return importlib.import_module(f"replicator._tf.plain.{file}")


if TYPE_CHECKING:  # plain/ has the same signatures
    from replicator._tf.fast.calls import pack_results as pack_results
    from replicator._tf.fast.calls import prepare_call as prepare_call
    from replicator._tf.fast.calls import with_less_optimizing as with_less_optimizing
    from replicator._tf.fast.captures import capture_all as capture_all
    from replicator._tf.fast.constants import (
        replace_new_constant as replace_new_constant,
    )
    from replicator._tf.fast.nodes import Nodes as Nodes
    from replicator._tf.fast.nodes import import_nodes as import_nodes
    from replicator._tf.fast.tracing import is_step as is_step
    from replicator._tf.fast.tracing import trace as trace
    from replicator._tf.fast.variables import place_of_reads as place_of_reads
    from replicator._tf.fast.variables import read_quickly as read_quickly
    from replicator._tf.fast.variables import write_quickly as write_quickly
else:
    _calls, _captures, _constants, _nodes, _tracing, _variables = map(choose, FILES)
    pack_results, prepare_call = _calls.pack_results, _calls.prepare_call
    with_less_optimizing = _calls.with_less_optimizing
    capture_all = _captures.capture_all
    replace_new_constant = _constants.replace_new_constant
    Nodes, import_nodes = _nodes.Nodes, _nodes.import_nodes
    trace, is_step = _tracing.trace, _tracing.is_step
    place_of_reads = _variables.place_of_reads
    read_quickly, write_quickly = _variables.read_quickly, _variables.write_quickly
