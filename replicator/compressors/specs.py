# SPDX-License-Identifier: Apache-2.0
"""Compressors as text: "bf16", "powersgd(rank=4)", "ef(topk(ratio=0.01))"."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.compressors.base import Compressor
from replicator.compressors.cast import BF16, FP16
from replicator.compressors.error_feedback import ErrorFeedback
from replicator.compressors.int8 import Int8
from replicator.compressors.powersgd import PowerSGD
from replicator.compressors.topk import TopK

# By name in the text form.
CLASSES: dict[str, type[Compressor]] = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
    "ef": ErrorFeedback,
}
_NONE = "none"


def parse(spec: str) -> Compressor | None:
    """Returns the compressor that a text describes.

    Example:
        >>> from replicator import compressors
        >>> compressors.parse("ef(powersgd(rank=2))")
        ErrorFeedback(compressor=PowerSGD(rank=2, warm_start=True, start_step=0))

    Args:
        spec: A name, followed by non-default options in parentheses; "ef" takes the
            text of another compressor there. "none" and "" stand for None.

    Raises:
        ArgumentError: The compressor or an option does not exist.
    """
    if not isinstance(spec, str):
        raise _bad(spec, "is not a str")
    if spec.strip() in ("", _NONE):
        return None
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _bad(spec, "cannot be read") from None
    value = _evaluated(spec, node)
    if not isinstance(value, Compressor):
        raise _bad(spec, "is not a compressor")
    return value


def text(compressor: Compressor | None) -> str:
    """Returns the text that describes a compressor; "" for None.

    Example:
        >>> from replicator import compressors
        >>> compressors.text(compressors.ErrorFeedback(compressors.TopK()))
        'ef(topk)'

    Args:
        compressor: The compressor.

    Raises:
        ArgumentError: It is of a user's class, which has no text form.
    """
    if compressor is None:
        return ""
    names = {cls: name for name, cls in CLASSES.items()}
    if type(compressor) not in names:
        raise errors.ArgumentError(
            f"{errors.repr_of(compressor)} cannot be written as text.",
            fix=f"use one of {_listed()}.",
        )
    options = []
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            options.append(text(value))
        elif value != field.default:
            if not isinstance(value, int):  # a float, or a number of NumPy's
                value = float(value)
            options.append(f"{field.name}={value!r}")
    name = names[type(compressor)]
    return f"{name}({', '.join(options)})" if options else name


def compressor(what: str, argument: Any) -> Compressor | None:
    """Returns a user's compressor argument: a Compressor, its text, or None.

    Args:
        what: The object it is passed to, for messages.
        argument: The user's argument.

    Raises:
        ArgumentError: It is none of these.
    """
    if argument is None or isinstance(argument, Compressor):
        return argument
    if isinstance(argument, str):
        return parse(argument)
    hint = ""
    if isinstance(argument, tf.Module):
        hint = " A Kept is for all_reduce; optimizers keep this state themselves."
    if inspect.isclass(argument) and issubclass(argument, Compressor):
        hint = f" Create an instance: {argument.__name__}()."
    raise errors.ArgumentError(
        f"{what} was given compressor={errors.repr_of(argument)}.",
        fix=f"pass a Compressor, or a text: {_listed()}.{hint}",
    )


def _evaluated(spec: str, node: ast.expr) -> Any:
    """Evaluates one node of a text."""
    if isinstance(node, ast.Name | ast.Call):
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        return _constructed(spec, call)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _bad(spec, "has an option that is not a plain value") from None


def _constructed(spec: str, call: ast.Call) -> Compressor:
    """Returns the compressor of a name with or without options."""
    name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
    cls = CLASSES.get(name)
    if cls is None:
        raise _bad(spec, f"names {errors.repr_of(name)}, which is not a compressor")
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if call.args and (fields != ["compressor"] or len(call.args) + len(options) > 1):
        raise _bad(spec, f"has options without names; expected {_signature(cls, name)}")
    if call.args:
        options = {"compressor": call.args[0]}
    unknown = [str(option) for option in options if option not in fields]
    if unknown:
        raise _bad(
            spec, f"has {errors.repr_of(unknown[0])}, which is not an option of {name}"
        )
    if len(options) < max(len(call.keywords), len(call.args)):
        raise _bad(spec, f"has an option of {name} twice")
    if "compressor" in fields and not options:
        raise _bad(spec, f"has {name} without a compressor")
    return cls(**{str(k): _evaluated(spec, value) for k, value in options.items()})


def _bad(spec: Any, problem: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"the compressor {errors.repr_of(spec)} {problem}.",
        fix=f"use one of {_listed()}.",
    )


def _listed() -> str:
    return ", ".join([*(_signature(c, n) for n, c in CLASSES.items()), '"none"'])


def _signature(cls: type[Compressor], name: str) -> str:
    """Returns a compressor's text with all of its options."""
    options = [
        "topk" if field.name == "compressor" else f"{field.name}={field.default}"
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]
    return f'"{name}({", ".join(options)})"' if options else f'"{name}"'
