# SPDX-License-Identifier: Apache-2.0
"""What a program of fit is, and how it runs.

A program is one function in a file of this folder under the decorator `program`. It
makes a model in a world, and returns results, which are those of Keras alone:

    @program(in_gate=True)
    def a_network(world):
        return fitted(world, classifier)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np

from tests.keras import worlds

X, Y = worlds.numbers(0, 23, 8), worlds.labels(0, 23)
FIT: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
# Of Replicator: programs have them in turn.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"variables": "mirrored"},
    {"variables": "sharded"},
    {"build": "clone", "variables": "mirrored"},
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of fit.

    Attributes:
        run: The program, a function of a world.
        replicas: The numbers of replicas on which it runs.
        tolerance: By how much results may differ.
        is_slow: Whether long runs only try it.
        options: Of Replicator.
    """

    run: worlds.Program
    replicas: Collection[int]
    tolerance: float
    is_slow: bool
    options: dict[str, Any]


PROGRAMS: dict[str, Program] = {}


def program(
    *replicas: int,
    cases: Mapping[str, Any] | None = None,
    in_gate: bool | Collection[str] = False,
    tolerance: float = 1e-5,
    **options: Any,
) -> Callable[[Any], Any]:
    """Adds a program to the catalogue.

    Args:
        *replicas: The numbers of replicas; by default 2 or 3, in turn.
        cases: What it is also given, by names: a program for each.
        in_gate: Whether each run of the suite tries it; or the cases of which it does.
        tolerance: By how much results may differ.
        **options: Of Replicator; by default some, in turn.
    """

    def register(run: Any) -> Any:
        for name, case in (cases or {"": None}).items():
            n = len(PROGRAMS)
            own = functools.partial(run, case=case) if cases else run
            is_quick = in_gate if isinstance(in_gate, bool) else name in in_gate
            title = f"{run.__name__}, {name}" if cases else run.__name__
            assert title not in PROGRAMS, title
            PROGRAMS[title] = Program(
                own,
                replicas or (2 + n % 2,),
                tolerance,
                not is_quick,
                options or _OPTIONS[n % len(_OPTIONS)],
            )
        return run

    return register


def fitted(world: worlds.World, make: Any, x: Any = X, y: Any = Y, **fit: Any) -> Any:
    """Returns the history of fit, an evaluation, and the weights."""
    model = world.made(make)
    if hasattr(x, "element_spec"):  # a dataset, which has batches
        history = model.fit(x, epochs=2, verbose=0, **fit).history
        return history, model.evaluate(x, verbose=0), model.get_weights()
    options = FIT | fit
    history = model.fit(x, y, **options).history
    scores = model.evaluate(x, y, options["batch_size"], verbose=0)
    return history, scores, model.get_weights()


def compiled(make: Any, *given: Any, **how: Any) -> Callable[[], Any]:
    """Returns a function that makes and compiles a model, by SGD if nothing else."""

    def made() -> Any:
        model = make()
        optimizer, *loss = given or ("sgd", "mse")
        one = optimizer() if callable(optimizer) else optimizer
        model.compile(one, *loss, **how)
        return model

    return made


class Batches(keras.callbacks.Callback):
    """Notes the batches that callbacks see, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append((batch, {k: np.array(v) for k, v in sorted(logs.items())}))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_end(batch, logs)
