# SPDX-License-Identifier: Apache-2.0
"""The law of a rule: what replicas compute of their parts is what one device computes.

For random inputs and random splits, join(op(split(inputs))) == op(inputs), for each op
and its gradient. Many ops are checked by one function so that it is built once. From
the plan, the law sees that no op was computed from gathered inputs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.forms import engine, rules
from replicator.forms.forms import REPLICATED, Partial, Replicated, Sharded, Unset
from replicator.forms.propagate import GraphPlan

SHARDED, SUM, WHOLE = "sharded", "sum", "whole"
_KINDS = {Sharded: SHARDED, Replicated: WHOLE, Partial: SUM, Unset: WHOLE}
_DIFFERENTIABLE = (tf.float32, tf.float64)


class Batch:
    """Random inputs of one length, made when they are first asked for.

    Attributes, each with shape [rows, 3]: x, y in (-3, 3), p, q in (0.1, 0.9), z
    complex, i, j in 0..5, b and c Booleans, s strings. `of(*shape)` are floats of other
    shapes.
    """

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self._random = rows, np.random.default_rng(seed + rows)
        self.arrays: dict[str, np.ndarray] = {}

    def make(self, key: str, shape: Sequence[int]) -> np.ndarray:
        """Returns the array of a name, whose first letter says what it is of."""
        if key not in self.arrays:
            self.arrays[key] = self._made(key[0], (self.rows, *shape))
        return self.arrays[key]

    def _made(self, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        random = self._random
        if kind == "z":
            parts = random.normal(size=(2, *shape)).astype(np.float32)
            return (parts[0] + 1j * parts[1]).astype(np.complex64)
        if kind in "ij":
            return random.integers(0, 5, shape).astype(np.int32)
        if kind in "bc":
            return random.integers(0, 2, shape).astype(bool)
        if kind == "s":
            return random.choice([b"12", b"7", b"-3"], shape).astype(object)
        low, high = (0.1, 0.9) if kind in "pq" else (-3, 3)
        return random.uniform(low, high, shape).astype(np.float32)


class Inputs:
    """What a sample is given: `v.x`, or `v("x", 4, 4)` of shape [rows, 4, 4]."""

    def __init__(self, get: Callable[[str, tuple[int, ...]], Any]) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return self._get(name, (3,))

    def __call__(self, name: str, *shape: int) -> Any:
        return self._get(f"{name}{shape}", shape)


@dataclasses.dataclass
class Sample:
    """One op whose rule is checked.

    Attributes:
        type: The type of the op.
        make: Builds it from a batch and returns its outputs.
        form: What becomes of its first output: SHARDED, SUM, WHOLE.
        grads: Whether its gradient is checked, too.
    """

    type: str
    make: Callable[[Inputs], Any]
    form: str = SHARDED
    grads: bool = True


def unary(names: str, kind: str = "x", **more: Any) -> list[Sample]:
    """Returns samples of ops of one batch, by the names of the inputs of raw ops."""
    return nary(names, kind, **more)


def nary(names: str, kinds: str, **more: Any) -> list[Sample]:
    """Returns samples of ops of several batches, e.g. "xp" for x and p."""
    return [Sample(name, _raw(name, kinds), **more) for name in names.split()]


def _raw(name: str, kinds: str) -> Callable[[Inputs], Any]:
    def make(v: Inputs) -> Any:
        kernel = getattr(tf.raw_ops, name)
        names = list(kernel.__signature__.parameters)[: len(kinds)]
        return kernel(**{n: getattr(v, k) for n, k in zip(names, kinds, strict=True)})

    return make


class _Names:
    """Names inputs before there are any: `v.x` and `v("x", 4)`, as of `Inputs`."""

    def __getattr__(self, name: str) -> Any:
        return lambda inputs: getattr(inputs, name)

    def __call__(self, name: str, *shape: int) -> Any:
        return lambda inputs: inputs(name, *shape)


v = _Names()


def op(kind: str, form: str = SHARDED, /, **arguments: Any) -> Sample:
    """Returns a sample of a raw op; its arguments are values, or functions of v."""

    def make(inputs: Inputs) -> Any:
        def value(one: Any) -> Any:
            if isinstance(one, list):
                return [value(each) for each in one]
            return one(inputs) if isinstance(one, types.FunctionType) else one

        found = {name: value(one) for name, one in arguments.items()}
        return getattr(tf.raw_ops, kind)(**found)

    return Sample(kind, make, form)


def forward(kind: str, form: str = SHARDED, /, **arguments: Any) -> Sample:
    """Returns a sample of a raw op whose gradient is not checked."""
    return dataclasses.replace(op(kind, form, **arguments), grads=False)


class Law:
    """Samples in one function, which plain TensorFlow and replicas run.

    Args:
        samples: The samples.
        replicas: The number of replicas.
        empty: Whether replicas may have no rows.
    """

    def __init__(
        self, samples: Sequence[Sample], replicas: int, empty: bool = True
    ) -> None:
        self._samples, self._keys = list(samples), self._asked(samples)
        self._names: dict[int, str | None] = {}
        specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in self._arrays(2)]
        self._plain = tf.function(self._step, input_signature=specs)
        repl = replicator.Replicator([f"cpu:{k}" for k in range(replicas)])
        self._on_replicas = engine.WholeBatchFunction(
            self._step, repl, specs, empty=empty
        )

    def _asked(self, samples: Iterable[Sample]) -> dict[str, tuple[int, ...]]:
        keys: dict[str, tuple[int, ...]] = {}
        batch = Batch(2)

        def get(key: str, shape: tuple[int, ...]) -> Any:
            keys[key] = shape
            return tf.constant(batch.make(key, shape))

        with tf.Graph().as_default():
            for sample in samples:
                sample.make(Inputs(get))
        return keys

    def _arrays(self, rows: int) -> list[np.ndarray]:
        batch = Batch(rows)
        return [batch.make(key, shape) for key, shape in self._keys.items()]

    @tf.autograph.experimental.do_not_convert
    def _step(self, *tensors: tf.Tensor) -> dict[str, list[tf.Tensor]]:
        given = dict(zip(self._keys, tensors, strict=True))
        results = {}
        for k, sample in enumerate(self._samples):
            with tf.name_scope(f"sample_{k}"):
                made, inputs = _made(sample, given, k)
                self._names[k] = _last(f"sample_{k}/", sample.type)
                grads = _gradients(made, inputs) if sample.grads else []
                results[f"{k} {sample.type}"] = [*made, *grads]
        return results

    def check_plan(self) -> None:
        """States that each op has the form that its sample says, not gathered."""
        plan = self._on_replicas.program((0,) * len(self._keys)).plan
        faults = []
        for k, sample in enumerate(self._samples):
            found = next((o for o in plan.plans if o.name == self._names[k]), None)
            if found is None:
                faults.append(f"{k} {sample.type}: there is no such op")
                continue
            form = _KINDS[type(plan.plans[found].makes[0].form)]
            if form != sample.form or _is_gathered(plan, found):
                faults.append(
                    f"{k} {sample.type}: {form}, of {plan.plans[found].needs}"
                )
        assert not faults, "\n".join(faults)

    def check(self, rows: int) -> None:
        """States that the results of a batch are those of one device."""
        arrays = self._arrays(rows)
        want, have = self._plain(*arrays), self._on_replicas(*arrays)
        wrong = [name for name in want if not _are_close(want[name], have[name])]
        shown = [f"{n}:\n{want[n]}\n{have[n]}" for n in wrong[:2]]
        assert not wrong, f"{wrong} of {rows} rows\n" + "\n".join(shown)


def _made(
    sample: Sample, given: dict[str, tf.Tensor], k: int
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the outputs of the k-th sample, and its inputs."""
    used: dict[str, tf.Tensor] = {}

    def get(key: str, shape: tuple[int, ...]) -> tf.Tensor:
        if key not in used:
            # A copy per sample, so that gradients are of its op alone, and of other
            # values, as ops of equal inputs are built once.
            x = tf.identity(given[key])
            used[key] = x * (1 - 1e-4 * k) if x.dtype in _DIFFERENTIABLE else x
        return used[key]

    return tf.nest.flatten(sample.make(Inputs(get))), list(used.values())


def _last(scope: str, kind: str) -> str | None:
    """Returns the name of the last op of a type that was made in a scope."""
    ops = tf.compat.v1.get_default_graph().get_operations()
    names = [op.name for op in ops if op.type == kind and op.name.startswith(scope)]
    return names[-1] if names else None


def _gradients(made: list[tf.Tensor], given: list[tf.Tensor]) -> list[tf.Tensor]:
    inputs = [x for x in given if x.dtype in _DIFFERENTIABLE]
    real = [y for y in made if y.dtype in _DIFFERENTIABLE]
    if not (inputs and real):
        return []
    seeds = [tf.cos(tf.stop_gradient(y)) for y in real]
    try:
        grads = tf.gradients(real, inputs, seeds)
    except LookupError:  # it has no gradient
        return []
    return [tf.convert_to_tensor(one) for one in grads if one is not None]


def _is_gathered(plan: GraphPlan, op: tf.Operation) -> bool:
    """Whether all inputs of an op are replicated, although some are not."""
    is_whole = all(need == REPLICATED for need in plan.plans[op].needs)
    return is_whole and any(isinstance(plan.fact(t).form, Sharded) for t in op.inputs)


def _are_close(want: Sequence[Any], have: Sequence[Any]) -> bool:
    pairs = list(zip(map(np.asarray, want), map(np.asarray, have), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    return all(
        np.allclose(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)
        if a.dtype.kind in "fc"
        else np.array_equal(a, b)
        for a, b in pairs
    )


def ruled(module: Any) -> set[str]:
    """Returns the types of ops that have a rule in a module."""
    items = rules.RULES.items()
    return {name for name, one in items if one.__module__ == module.__name__}


def missing(module: Any, samples: Iterable[Sample], without: str = "") -> set[str]:
    """Returns the types with a rule in a module that have no sample, and need one."""
    return ruled(module) - {sample.type for sample in samples} - set(without.split())
