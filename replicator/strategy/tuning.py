# SPDX-License-Identifier: Apache-2.0
"""tune: finds the fastest of several strategies by measuring real steps.

Each candidate trains its own model, created by the caller's function: existing
variables could no longer be split, and the steps would change them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, errors
from replicator.costs import timed
from replicator.strategy import predictions
from replicator.strategy.builder import Builder
from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.builders.auto import Auto
from replicator.strategy.builders.parallax import Parallax
from replicator.strategy.builders.partitioned import (
    PartitionedAR,
    PartitionedPS,
    UnevenPartitionedPS,
)
from replicator.strategy.builders.ps import PS, PSLoadBalancing
from replicator.strategy.builders.sharded import Mirrored, Sharded
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.strategy.trials import Trial
from replicator.variables.synchronizer import error

_WARM_UP = 2  # unmeasured steps of each; the first one builds
_MOST_TRIALS = 10**6


def tune(
    make: Callable[[Any], Any],
    *others: Any,
    trials: int = 20,
    strategies: Sequence[Builder] | None = None,
    best: int = 4,
    progress: bool = True,
) -> Strategy:
    """Returns the fastest strategy for a training step, measured on real steps.

    Strategies are ranked by the predicted time of their variables in a step, and the
    best are measured. Each trains its own model, and they take turns; your existing
    objects are not changed. Name your Keras layers: within a process, Keras gives
    unnamed ones a different name each time.

    Example:
        >>> def make(strategy):
        ...     repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=strategy)
        ...     with repl.context():
        ...         v = tf.Variable([1.0, 2.0], name="v")
        ...         optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
        ...     def step_fn():
        ...         with tf.GradientTape() as tape:
        ...             loss = tf.reduce_sum(v ** 2)
        ...         optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        ...         return loss
        ...     return repl, step_fn
        >>> fastest = replicator.strategy.tune(make, trials=2, progress=False)
        >>> fastest.save("fastest.pb")
        >>> fastest.trials[0].measured > 0
        True
        >>> repl, step_fn = make("fastest.pb")

    Args:
        make: Takes a strategy, and returns (repl, step_fn) or (repl, step_fn,
            input_fn), as for `python -m replicator.plan`: a new Replicator with this
            strategy, and new variables.
        *others: Not used; passing an existing Replicator and step_fn raises an error
            that says what to pass.
        trials: The number of measured steps per strategy; medians are compared.
        strategies: The builders to choose from; None: Auto, and builders of each kind.
        best: The number of strategies to measure, those with the least predicted time,
            Auto included; as many models exist at a time.
        progress: Whether to show a progress bar, if tqdm is installed.

    Returns:
        The fastest strategy, whose `trials` hold all measurements, the fastest first.

    Raises:
        ArgumentError: `make` is not a function, or returns something else; or another
            argument is invalid.
        InputError: Its inputs are too short for a step.
        StrategyError: Its Replicator has another strategy, or no trained variables; or
            it creates different variables each time.
        ContextError: Called while a graph is being built.
    """
    _check(make, others, trials, strategies, best, progress)
    survey = _Survey()
    _ = _step(make, survey).plan  # builds it
    if not survey.facts:
        raise error(
            "tune was given a function whose Replicator asks its strategy for no "
            "variable.",
            "create the Replicator with it, Replicator(devices, strategy=strategy), "
            "and in its context the variables that a wrapped optimizer trains.",
        )
    candidates = _ranked(strategies or _usual(), survey)[:best]
    tried = [_prepared(make, candidate, survey) for candidate in candidates]
    runnable = [candidate for candidate in tried if candidate.step is not None]
    if not runnable:
        raise tried[0].failure or AssertionError("it has no step, and did not fail")
    _measure(runnable, trials, progress)
    ranked = sorted(tried, key=lambda one: (one.step is None, one.median or 0.0))
    results = tuple(candidate.trial for candidate in ranked)
    return dataclasses.replace(ranked[0].strategy, trials=results)


def _usual() -> list[Builder]:
    """Returns a builder of each kind that decides by rules."""
    return [
        Auto(),
        Sharded(),
        Mirrored(),
        AllReduce(),
        PS(),
        PSLoadBalancing(),
        Parallax(),
        PartitionedPS(),
        UnevenPartitionedPS(),
        PartitionedAR(),
    ]


class _Survey(Builder):
    """Records all variables, and which gradients are sparse; changes nothing."""

    def __init__(self) -> None:
        self.facts: dict[str, VariableFacts] = {}
        self.resources = Resources(())

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        self.resources = resources
        for variable in variables:
            if variable.whole or variable.sparse is not None:  # reading `sparse` waits
                facts = VariableFacts(**vars(variable))
                self.facts[facts.path] = dataclasses.replace(facts, whole=False)
            yield None


class _Replayed(Builder):
    """Replays a strategy's nodes in the variables' order, whatever their names."""

    def __init__(self, strategy: Strategy, survey: _Survey) -> None:
        self._strategy, self._survey = strategy, survey

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        surveyed = list(self._survey.facts.values())
        for n, variable in enumerate(variables):
            facts = surveyed[n] if n < len(surveyed) else None
            if facts is None or (facts.shape, facts.dtype) != (
                variable.shape,
                variable.dtype,
            ):
                first = "none" if facts is None else f"{facts.path} {facts.shape}"
                raise error(
                    "tune was given a function that creates different variables each "
                    f"time: {variable.path} {variable.shape} where it first created "
                    f"{first}.",
                    "create the same variables in the same order in each call.",
                )
            node = self._strategy.node(facts.path)
            yield node and dataclasses.replace(node, name=variable.path)


@dataclasses.dataclass
class _Candidate:
    """A strategy and its results so far.

    Attributes:
        builder: The builder of the strategy.
        strategy: The strategy, with the survey's paths of variables.
        predicted: The predicted seconds per step for its variables.
        step: Runs a step; None if it cannot be built.
        failure: Why it cannot be built.
        times: The seconds of each measured step.
    """

    builder: Builder
    strategy: Strategy
    predicted: float
    step: Any = None
    failure: errors.ReplicatorError | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.times) if self.times else None

    @property
    def trial(self) -> Trial:
        problem = "" if self.failure is None else errors.one_line(self.failure)
        builder, strategy_id = repr(self.builder), self.strategy.id
        return Trial(builder, strategy_id, self.predicted, self.median, problem)


def _ranked(made: Sequence[Builder], survey: _Survey) -> list[_Candidate]:
    """Returns the builders' candidates: Auto, then by predicted time."""
    facts, candidates = list(survey.facts.values()), list[_Candidate]()
    for builder in made:
        assumed = predictions.Assumed()
        if isinstance(builder, Auto):
            assumed = builder.assumed
        strategy = builder.build(facts, survey.resources)
        nodes = tuple(_costed(strategy, survey, assumed))
        strategy = dataclasses.replace(strategy, nodes=nodes, id="")
        if all(strategy != candidate.strategy for candidate in candidates):
            seconds = predictions.step_seconds(strategy.nodes)
            candidates.append(_Candidate(builder, strategy, seconds))
    return sorted(
        candidates, key=lambda c: (not isinstance(c.builder, Auto), c.predicted)
    )


def _costed(
    strategy: Strategy, survey: _Survey, assumed: predictions.Assumed
) -> list[Node]:
    """Returns a strategy's nodes for the variables found, with predicted costs."""
    nodes, known = [], []
    for facts in survey.facts.values():
        node = strategy.node(facts.path)
        if node is not None:
            node = dataclasses.replace(node, shape=facts.shape, dtype=facts.dtype)
            nodes.append(node)
            known.append((bool(facts.sparse), assumed))
    return predictions.predicted_together(nodes, survey.resources, known)


def _step(make: Callable[[Any], Any], strategy: Builder) -> Any:
    """Builds the step that `make` returns for a strategy."""
    program = make(strategy)
    if not isinstance(program, tuple) or len(program) not in (2, 3):
        raise _wrong(
            f"a function that returns {errors.repr_of(program)}",
            "return a tuple (repl, step_fn) or (repl, step_fn, input_fn).",
        )
    repl, *functions = program
    if not _is_replicator(repl):
        raise _wrong(
            f"a function that returns {errors.repr_of(repl)} first",
            "return a Replicator first.",
        )
    return repl.build(*functions)


def _prepared(
    make: Callable[[Any], Any], candidate: _Candidate, survey: _Survey
) -> _Candidate:
    """Returns a candidate whose step has run, or that records why it cannot."""
    try:
        step = _step(make, _Replayed(candidate.strategy, survey))
        for _ in range(_WARM_UP):
            timed.run(step)
    except errors.StrategyError as failure:
        return dataclasses.replace(candidate, failure=failure)
    except errors.UnsupportedError as failure:
        return dataclasses.replace(candidate, failure=failure)
    return dataclasses.replace(candidate, step=step)


def _measure(candidates: Sequence[_Candidate], trials: int, progress: bool) -> None:
    """Measures steps of all candidates in turn; each leads about equally often."""
    with _bar(trials * len(candidates), progress) as advance:
        for n in range(trials):
            turn = n % len(candidates)
            for candidate in [*candidates[turn:], *candidates[:turn]]:
                candidate.times.append(timed.run(candidate.step))
                advance()


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], Any]]:
    """Shows a progress bar in this block, if tqdm is installed."""
    try:
        if not progress:
            raise ModuleNotFoundError
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda: None
        return
    with tqdm(total=total, unit="step", desc="tuning") as bar:
        yield bar.update


def _is_replicator(value: Any) -> bool:
    """Whether this is a Replicator, whose class imports this module."""
    return any(kind.__name__ == "Replicator" for kind in type(value).__mro__)


def _wrong(problem: str, fix: str) -> errors.ArgumentError:
    return errors.ArgumentError(f"tune was given {problem}.", fix=fix)


def _check(
    make: Any, others: Any, trials: Any, strategies: Any, best: Any, progress: Any
) -> None:
    """Raises ArgumentError or ContextError for invalid arguments or in a graph."""
    if _is_replicator(make) or not callable(make) or others:
        raise _wrong(
            ", ".join(map(errors.repr_of, (make, *others))),
            "pass a function that takes a strategy, creates a Replicator with it and "
            "new variables, and returns (repl, step_fn, input_fn): steps are run to "
            "measure them, which would change existing variables.",
        )
    if arguments.refuses(make, 1):
        raise _wrong(
            f"{errors.repr_of(make)}, which cannot be called with a strategy alone",
            "pass a function of one argument, the strategy for its Replicator.",
        )
    for name, value in (("trials", trials), ("best", best)):
        if not arguments.is_whole(value, 1, _MOST_TRIALS):
            raise _wrong(
                f"{name}={errors.repr_of(value)}",
                f"pass an int from 1 to {_MOST_TRIALS}.",
            )
    if not isinstance(progress, bool):
        raise _wrong(f"progress={errors.repr_of(progress)}", "pass a bool.")
    is_list = isinstance(strategies, list | tuple) and bool(strategies)
    if strategies is not None and not (
        is_list and all(isinstance(builder, Builder) for builder in strategies)
    ):
        raise _wrong(
            f"strategies={errors.repr_of(strategies)}",
            "pass a list of builders, e.g. [replicator.strategy.Auto()]; or None.",
        )
    if not tf.executing_eagerly():
        raise errors.ContextError(
            "tune measures steps, but was called where a graph is being built.",
            fix="call it outside of tf.function and tf.Graph.",
        )
