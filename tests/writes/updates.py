# SPDX-License-Identifier: Apache-2.0
"""Draws the statements in which an optimizer writes."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.writes import program as p
from tests.writes import values
from tests.writes.values import Drawing

_RATE = 0.125


@dataclasses.dataclass(frozen=True)
class _Kind:
    """An optimizer.

    Attributes:
        text: The expression that makes it.
        family: "keras", "v1" or "sonnet".
        plain: Whether it subtracts the gradient times _RATE.
        noisy: Whether it writes other values on each replica.
        aggregated: Whether its noisy writes are aggregated, if it is wrapped.
        unknown: Whether it is not recognised as an optimizer, so that all of its
            assignments are aggregated.
    """

    text: str
    family: str
    plain: bool = False
    noisy: bool = False
    aggregated: bool = True
    unknown: bool = False


_KINDS = (
    _Kind(f"keras.optimizers.SGD({_RATE})", "keras", plain=True),
    _Kind(f"keras.optimizers.SGD({_RATE}, momentum=0.5)", "keras"),
    _Kind(f"keras.optimizers.Adam({_RATE}, clipnorm=1.0)", "keras"),
    _Kind(f"optimizers.NoisySGD({_RATE})", "keras", noisy=True),
    _Kind(f"v1.train.GradientDescentOptimizer({_RATE})", "v1", plain=True),
    _Kind(f"v1.train.AdamOptimizer({_RATE})", "v1"),
    _Kind(
        "v1.train.GradientDescentOptimizer(optimizers.noisy_rate)",
        "v1",
        noisy=True,
        aggregated=False,
    ),
    _Kind(f"snt.optimizers.SGD({_RATE})", "sonnet", plain=True),
    _Kind(f"snt.optimizers.Adam({_RATE})", "sonnet"),
    _Kind("optimizers.NoisySonnet()", "sonnet", noisy=True, unknown=True),
)


def by_optimizer(by: Drawing) -> p.Statement | None:
    """Draws an optimizer, wrapped or not, and lets it write a variable."""
    among = [v for v in by.variables if v.dtype == "float32" and not v.on_read]
    if not among:
        return None
    # Sonnet 2 does not support sessions.
    kinds = [k for k in _KINDS if by.mode != "session" or "snt." not in k.text]
    variable, kind = by.choice(among), by.choice(kinds)
    wrapped = by.integer(0, 2) > 0
    gradient = values.draw(by, "float32", equal=not wrapped and by.integer(0, 3) > 0)
    name = by.fresh("optimizer")
    text = gradient.text
    sparse = by.integer(0, 3) == 3
    if sparse:
        text = f"tf.IndexedSlices({text}, tf.constant([0, 1, 2]), tf.constant([3]))"

    def effect(state: p.State) -> None:
        gradients, held = gradient.value(state), state.held[variable.name]
        if gradients is None or held is None or not kind.plain:
            return state.forget([variable])
        mean = (
            sum(gradients[1:], gradients[0]) / len(gradients)
            if wrapped
            else gradients[0]
        )
        state.held[variable.name] = [x - np.float32(_RATE) * mean for x in held]

    setup = [f"{name} = {kind.text}"]
    if wrapped:
        setup = [f"{name} = repl.wrap_optimizer({kind.text})"]
    if kind.family == "keras":
        setup.append(f"{name}.build([{variable.name}])")
    if kind.family == "v1":
        line = f"{name}.apply_gradients([({text}, {variable.name})])"
    else:
        line = f"{name}.apply([{text}], [{variable.name}])"
    return p.Statement(
        (line,),
        _verdict(by, kind, wrapped, gradient.equal, sparse),
        (variable,),
        effect,
        tuple(setup),
    )


def _verdict(by: Drawing, kind: _Kind, wrapped: bool, equal: bool, sparse: bool) -> str:
    if sparse and kind.noisy:
        return p.OPEN  # they may not support it
    if kind.unknown:
        return p.RIGHT
    if kind.noisy and not (wrapped and (kind.aggregated or by.sharded)):
        return p.WRONG  # of several updates of one variable, its owner's is done
    return p.RIGHT if wrapped or equal else p.WRONG
