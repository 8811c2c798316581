# SPDX-License-Identifier: Apache-2.0
"""tune: the fastest of several strategies, measured on real steps.

Each candidate trains a model of its own, which the caller's function makes: variables
that there are already could not be in parts any more, and steps would change them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, errors
from replicator.step import timed
from replicator.strategy import predictions
from replicator.strategy.builder import Builder
from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.builders.auto import Auto
from replicator.strategy.builders.parallax import Parallax
from replicator.strategy.builders.partitioned_ar import PartitionedAR
from replicator.strategy.builders.partitioned_ps import PartitionedPS
from replicator.strategy.builders.ps import PS
from replicator.strategy.builders.ps_load_balancing import PSLoadBalancing
from replicator.strategy.builders.sharded import Mirrored, Sharded
from replicator.strategy.builders.uneven_partitioned_ps import UnevenPartitionedPS
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node, error
from replicator.strategy.trials import Trial

_WARM_UP = 2  # steps of each before any is measured; the first one builds
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

    What each strategy's variables take in a step is predicted, and those of which that
    is least are measured. Each trains a model of its own, and they take turns; nothing
    that you have made before is changed. In the same process name your Keras layers:
    Keras calls those without a name differently each time.

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
        make: Is given a strategy, and returns (repl, step_fn) or (repl, step_fn,
            input_fn), as for `python -m replicator.plan`: a new Replicator with this
            strategy, and new variables.
        *others: None. Whoever passes a Replicator and a step_fn that there are already
            is told what to pass.
        trials: How many steps of each are measured; medians are compared.
        strategies: The builders to choose from; None: Auto, and builders of each kind.
        best: How many are measured, those of which least is predicted; so many models
            there are at a time. Auto is one of them.
        progress: Whether a progress bar is shown, if tqdm is installed.

    Returns:
        The fastest one, whose `trials` say what was measured, the fastest first.

    Raises:
        ArgumentError: `make` is no function, or returns something else; or another
            argument is bad.
        InputError: Its inputs have nothing for a step.
        StrategyError: Its Replicator has another strategy, or no variables that are
            trained; or it makes other variables each time.
        ContextError: Called where a graph is being built.
    """
    _check(make, others, trials, strategies, best, progress)
    survey = _Survey()
    _ = _step(make, survey).plan  # builds it
    if not survey.facts:
        raise error(
            "tune was given a function whose Replicator asks its strategy for no "
            "variable.",
            "make the Replicator with it, Replicator(devices, strategy=strategy), and "
            "variables that a wrapped optimizer trains in its context.",
        )
    candidates = _ranked(strategies or _usual(), survey)[:best]
    tried = [_prepared(make, candidate, survey) for candidate in candidates]
    runnable = [one for one in tried if one.step is not None]
    if not runnable:
        raise tried[0].failure or AssertionError("it has no step, and did not fail")
    _measure(runnable, trials, progress)
    ranked = sorted(tried, key=lambda one: (one.step is None, one.median or 0.0))
    results = tuple(one.trial for one in ranked)
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
    """Notes all variables, and which gradients are sparse; leaves them as they are."""

    def __init__(self) -> None:
        self.facts: dict[str, VariableFacts] = {}
        self.resources = Resources(())

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        self.resources = resources
        for variable in variables:
            if variable.whole or variable.sparse is not None:  # who asks waits
                known = VariableFacts(**vars(variable))
                self.facts[known.path] = dataclasses.replace(known, whole=False)
            yield None


class _Replayed(Builder):
    """The nodes of a strategy, in the order of variables, whatever these are called."""

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
                    "tune was given a function that makes other variables each time: "
                    f"{variable.path} {variable.shape} where it first made {first}.",
                    "make the same variables in the same order at each call.",
                )
            node = self._strategy.node(facts.path)
            yield node and dataclasses.replace(node, name=variable.path)


@dataclasses.dataclass
class _Candidate:
    """A strategy, and what came of it so far.

    Attributes:
        builder: What made it.
        strategy: The strategy, with the variables' paths of the survey.
        predicted: The seconds of a step that its variables are predicted to take.
        step: Runs a step; None if it cannot be built.
        failure: Why it cannot.
        times: What each measured step took, in seconds.
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
        return Trial(
            *(repr(self.builder), self.strategy.id, self.predicted),
            *(self.median, problem),
        )


def _ranked(made: Sequence[Builder], survey: _Survey) -> list[_Candidate]:
    """Returns what builders say of the variables: Auto, then the least predicted."""
    facts, found = list(survey.facts.values()), list[_Candidate]()
    for builder in made:
        assumed = builder.assumed if isinstance(builder, Auto) else None
        strategy = builder.build(facts, survey.resources)
        nodes = tuple(_costed(strategy, one, survey, assumed) for one in facts)
        strategy = dataclasses.replace(
            strategy, nodes=tuple(node for node in nodes if node is not None), id=""
        )
        if all(strategy != one.strategy for one in found):
            seconds = predictions.step_seconds(strategy.nodes)
            found.append(_Candidate(builder, strategy, seconds))
    return sorted(found, key=lambda c: (not isinstance(c.builder, Auto), c.predicted))


def _costed(
    strategy: Strategy,
    facts: VariableFacts,
    survey: _Survey,
    assumed: predictions.Assumed | None,
) -> Node | None:
    node = strategy.node(facts.path)
    if node is None:
        return None
    node = dataclasses.replace(node, shape=facts.shape, dtype=facts.dtype)
    return predictions.predicted(
        *(node, facts.shape, facts.nbytes, survey.resources, bool(facts.sparse)),
        assumed or predictions.Assumed(),
    )


def _step(make: Callable[[Any], Any], strategy: Builder) -> Any:
    """Returns the step of what `make` makes with a strategy."""
    made = make(strategy)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise _wrong(
            f"a function that returns {errors.shown(made)}",
            "return a tuple (repl, step_fn) or (repl, step_fn, input_fn).",
        )
    repl, *functions = made
    if not _is_replicator(repl):
        raise _wrong(
            f"a function that returns {errors.shown(repl)} first",
            "return a Replicator first.",
        )
    return repl.build(*functions)


def _prepared(
    make: Callable[[Any], Any], candidate: _Candidate, survey: _Survey
) -> _Candidate:
    """Returns a candidate whose step has run, or which says why it cannot."""
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
    """Measures steps of all; they take turns, and each comes first about as often."""
    with _bar(trials * len(candidates), progress) as advance:
        for n in range(trials):
            turn = n % len(candidates)
            for candidate in [*candidates[turn:], *candidates[:turn]]:
                candidate.times.append(timed.run(candidate.step))
                advance()


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], Any]]:
    """In this block there is a progress bar, if tqdm is installed."""
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
    """Whether this is a Replicator, whose class imports this room."""
    return any(kind.__name__ == "Replicator" for kind in type(value).__mro__)


def _wrong(problem: str, fix: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        errors.compose(f"tune was given {problem}.", [f"at {errors.user_line()}"], fix)
    )


def _check(
    make: Any, others: Any, trials: Any, strategies: Any, best: Any, progress: Any
) -> None:
    """Raises ArgumentError or ContextError unless all can be tried."""
    if _is_replicator(make) or not callable(make) or others:
        raise _wrong(
            ", ".join(map(errors.shown, (make, *others))),
            "pass a function that takes a strategy, makes a Replicator with it and all "
            "variables anew, and returns (repl, step_fn, input_fn): steps are run to "
            "measure them, which would change variables that there are.",
        )
    if arguments.refuses(make, 1):
        raise _wrong(
            f"{errors.shown(make)}, which cannot be called with a strategy alone",
            "pass a function of one argument, the strategy for its Replicator.",
        )
    for name, value in (("trials", trials), ("best", best)):
        if not arguments.is_whole(value, 1, _MOST_TRIALS):
            raise _wrong(
                f"{name}={errors.shown(value)}",
                f"it is an int from 1 to {_MOST_TRIALS}.",
            )
    if not isinstance(progress, bool):
        raise _wrong(f"progress={errors.shown(progress)}", "it is a bool.")
    listed = isinstance(strategies, list | tuple) and bool(strategies)
    if strategies is not None and not (
        listed and all(isinstance(one, Builder) for one in strategies)
    ):
        raise _wrong(
            f"strategies={errors.shown(strategies)}",
            "it is a list of builders, as [replicator.strategy.Auto()]; or None.",
        )
    if not tf.executing_eagerly():
        raise errors.ContextError(
            errors.compose(
                "tune was called where a graph is being built, and measures steps.",
                [f"at {errors.user_line()}"],
                "call it outside of tf.function and tf.Graph.",
            )
        )
