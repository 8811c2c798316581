# SPDX-License-Identifier: Apache-2.0
"""The public names, and the page of the reference that each of them is on.

Independent of Sphinx, so that a test can check that every name has a page.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import replicator
import replicator.compressors
import replicator.plan
import replicator.strategy

_MODULES = (replicator, replicator.strategy, replicator.compressors, replicator.plan)
# Members of these classes that only modules of ours use: they are on no page.
_INTERNAL: dict[type, tuple[str, ...]] = {
    replicator.ReplicatedVariable: (
        *("description", "key", "lock", "outside", "placement", "policy"),
        *("read_on_host", "refresh_copy", "restore", "settle_if_undecided"),
        *("handle", "scatter_nd_max", "scatter_nd_min"),  # as of resource variables
    ),
    replicator.ResourceSpec: ("description",),
    replicator.plan.Value: ("of",),
}
# Users receive objects of these and make none: their pages show no arguments.
GIVEN = (
    *("Group", "Partition", "ReplicatedVariable", "Step", "Positions", "Cluster"),
    *("AsynchronousCluster", "DistributedSession", "DistributedFunction"),
    *("plan.Plan", "plan.Row", "plan.Total", "plan.Totals", "plan.Wire", "plan.Link"),
    *("plan.Value", "compressors.Link", "compressors.Residual", "strategy.Trial"),
    "Rates",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A page of the reference that lists others.

    Attributes:
        slug: The name of its file.
        title: Its heading.
        about: A paragraph, in reStructuredText.
        names: The public names of its pages, in the form of `short`.
    """

    slug: str
    title: str
    about: str
    names: tuple[str, ...]


# The methods and properties of Replicator, by topic.
METHODS: dict[str, tuple[str, ...]] = {
    "Building and running steps": (
        "run",
        "epoch",
        "build",
        "select",
        "initialize",
        "inputs",
    ),
    "Variables, optimizers and models": ("context", "wrap_optimizer", "keras_model"),
    "Who am I": (
        *("num_replicas", "devices", "replica_id", "weight", "logical_device"),
        *("group", "groups"),
    ),
    "Collectives": (
        *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"),
        *("gather", "scatter", "all_to_all", "permute", "shift", "barrier"),
    ),
    "Messages": ("send", "recv", "linked"),
    "Python objects": ("broadcast_object", "all_gather_object"),
    "Methods of TF-Replicator": (
        *("all_sum", "all_min", "all_max", "map_reduce", "map_gather"),
    ),
    "Looking at steps": ("plan", "stages", "strategy"),
}

SECTIONS = (
    Section(
        "values",
        "Values, inputs and variables",
        "What steps take, return and hold.",
        (
            *("PerReplica", "Extremum", "Group", "Partition", "InputContext"),
            *("ReplicatedVariable", "Step", "Positions"),
        ),
    ),
    Section(
        "hosts",
        "Several hosts",
        "Connecting to other hosts, and going on when one of them is lost. The program "
        "that starts everything is :doc:`replicator.launch </reference/api/launch>`.",
        (
            *("connect", "Cluster", "AsynchronousCluster", "ResourceSpec"),
            *("resilient", "Checkpoint"),
        ),
    ),
    Section(
        "autodist",
        "Programs for one device",
        "Running a program that knows nothing of replicas.",
        ("AutoDist", "DistributedSession", "DistributedFunction"),
    ),
    Section(
        "strategies",
        "Strategies",
        "For each variable, where it is and how its gradient travels. All names are "
        "of the module ``replicator.strategy``.",
        tuple(
            f"strategy.{name}"
            for name in (
                *("Auto", "AllReduce", "Mirrored", "Sharded", "Parallax"),
                *("PS", "PSLoadBalancing", "Partitioned", "PartitionedPS"),
                *("PartitionedAR", "UnevenPartitionedPS", "RandomAxisPartitionAR"),
                *("Rules", "Strategy", "Node", "AllReduceSynchronizer"),
                *("PSSynchronizer", "Builder", "VariableFacts", "Resources"),
                *("tune", "Trial", "Assumed"),
            )
        ),
    ),
    Section(
        "compressors",
        "Compressors",
        "What makes gradients smaller on their way. All names are of the module "
        "``replicator.compressors``.",
        tuple(
            f"compressors.{name}"
            for name in (
                *("BF16", "FP16", "Int8", "TopK", "PowerSGD", "ErrorFeedback", "Kept"),
                *("Compressor", "Link", "Residual", "Sums", "parse", "text"),
            )
        ),
    ),
    Section(
        "plans",
        "Plans and costs",
        "What a step communicates, to look at before it runs, and what that costs. The "
        "names that begin with ``plan`` are of the module ``replicator.plan``.",
        (
            *("plan.Plan", "plan.Row", "plan.Total", "plan.Totals", "plan.Link"),
            *("plan.Wire", "plan.Value", "Calibration", "Rates"),
        ),
    ),
)


def public() -> dict[str, Any]:
    """Returns all public names except methods, e.g. "replicator.strategy.PS"."""
    objects: dict[str, Any] = {}
    for module in _MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType):
                objects[f"{module.__name__}.{name}"] = value
    return objects


def methods() -> tuple[str, ...]:
    """Returns the public methods and properties of Replicator."""
    return tuple(n for n in dir(replicator.Replicator) if not n.startswith("_"))


def members(cls: type) -> dict[str, Any]:
    """Returns the methods and properties of a public class that are for users.

    Those that tf.Variable has as well are documented by TensorFlow.
    """
    hidden = {*_INTERNAL.get(cls, ())}
    if issubclass(cls, tf.Variable):
        hidden.update(dir(tf.Variable))
    return {
        name: getattr(cls, name)
        for name in dir(cls)
        if (name == "__call__" or not name.startswith("_"))
        and name not in hidden
        and _is_ours(inspect.getattr_static(cls, name))
    }


def _is_ours(member: Any) -> bool:
    """Whether a member of a class is a method or property that we wrote."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if not isinstance(function, types.FunctionType):
        return False
    return inspect.unwrap(function).__module__.startswith("replicator.")


def own_members(cls: type) -> dict[str, Any]:
    """Returns those members that no other public class passes on to this one.

    A builder's `nodes`, say, does what `Builder.nodes` says and shows by an example.
    """
    known = {value for value in public().values() if isinstance(value, type)}
    inherited = {
        name for base in cls.__mro__[1:] if base in known for name in members(base)
    }
    return {n: value for n, value in members(cls).items() if n not in inherited}


def attributes(cls: type) -> tuple[str, ...]:
    """Returns the attributes that the docstring of a class lists."""
    _, _, listed = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    section, _, _ = listed.partition("\n\n")
    return tuple(re.findall(r"^    (\w+):", section, re.MULTILINE))


def undocumented() -> list[str]:
    """Returns what is public and has no docstring, or is in no list of attributes."""
    return [
        f"{name} is public and has no docstring"
        for full, value in public().items()
        for name in _undocumented(short(full), value)
    ]


def _undocumented(name: str, value: Any) -> Iterator[str]:
    if not _has_docstring(value):
        yield name
    if not isinstance(value, type):
        return
    for member, own in members(value).items():
        if not inspect.getdoc(own):
            yield f"{name}.{member}"
    if dataclasses.is_dataclass(value):
        fields = {field.name for field in dataclasses.fields(value)}
        for field in sorted(fields.difference(attributes(value))):
            yield f"{name}.{field}"


def _has_docstring(value: Any) -> bool:
    """Whether a class or function has a docstring that somebody wrote."""
    text = value.__doc__ or ""
    return bool(text) and not text.startswith(f"{value.__name__}(")  # a dataclass's own


def short(full: str) -> str:
    """Returns the name of a page: "strategy.PS" for "replicator.strategy.PS"."""
    return full.removeprefix("replicator.")


def is_error(value: Any) -> bool:
    """Whether a public name is an error class; the errors page covers those."""
    return isinstance(value, type) and issubclass(value, Exception)


def aliases() -> dict[str, str]:
    """Returns the public name of each class and function, by where it is defined."""
    return {
        f"{value.__module__}.{value.__qualname__}": full
        for full, value in public().items()
    }


def by_short_name() -> dict[str, str]:
    """Returns the full public name for each way in which texts may refer to something.

    "Replicator.run", "repl.run" and "replicator.Replicator.run" are the same method; so
    is "run", unless another public name ends with it.
    """
    full_names: dict[str, str] = {}
    for full in public():
        full_names[full] = full
        full_names[short(full)] = full
        full_names[f"replicator.{short(full)}"] = full
        full_names.setdefault(full.rpartition(".")[2], full)
    for name in methods():
        full = f"replicator.Replicator.{name}"
        for way in (full, f"Replicator.{name}", f"repl.{name}"):
            full_names[way] = full
        full_names.setdefault(name, full)
    return full_names


def missing(errors_page: str) -> list[str]:
    """Returns the differences: names without a page, and pages without a name.

    Args:
        errors_page: The text of the page about errors.
    """
    known = public()
    listed = [name for section in SECTIONS for name in section.names]
    expected = {short(full) for full, value in known.items() if not is_error(value)}
    expected.discard("Replicator")
    of_methods = [name for names in METHODS.values() for name in names]
    return [
        *_differences("", expected, listed),
        *_differences("Replicator.", set(methods()), of_methods),
        *(
            f"{short(full)} has no section in reference/errors.md"
            for full, value in known.items()
            if is_error(value) and f"\n## {short(full)}\n" not in errors_page
        ),
    ]


def _differences(prefix: str, expected: set[str], listed: list[str]) -> Iterator[str]:
    for name in sorted(expected.difference(listed)):
        yield f"{prefix}{name} is public and has no page: list it in docs/_ext/names.py"
    for name in sorted(set(listed).difference(expected)):
        yield f"{prefix}{name} has a page and is not public"
    for name in sorted({n for n in listed if listed.count(n) > 1}):
        yield f"{prefix}{name} has two pages"


def first_line(value: Any) -> str:
    """Returns the first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]
