# SPDX-License-Identifier: Apache-2.0
"""A replica's copies of one tensor, in the forms that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.conversions import Conversions, in_graph
from replicator.forms.forms import (
    REPLICATED,
    UNSET,
    Fact,
    Form,
    Own,
    Partial,
    Sharded,
    equal,
)
from replicator.forms.rule import LOCAL, UNUSED, Need, Version


class Value:
    """A replica's copies of a tensor, in the forms that were asked for so far.

    Attributes:
        fact: What is known of the tensor.
        local: The copy of its local version, or None.
    """

    def __init__(
        self,
        replica: Conversions,
        fact: Fact,
        made: Any,
        local: tf.Tensor | None = None,
    ) -> None:
        self.fact, self.local = fact, local
        self._replica, self._made = replica, made
        self._graph = tf.compat.v1.get_default_graph()
        self._versions: list[tuple[Form, tf.Tensor]] = []

    def copy(self, form: Form | None = None) -> Any:
        """Returns the copy in this form, or as it was made.

        Whatever must be built for it is built in the graph of the tensor: outside of a
        loop, if the tensor is from outside.
        """
        if callable(self._made):
            with in_graph(self._graph):
                self._made = self._made()
        have = self.fact.form
        if form is None or UNSET in (have, form) or equal(have, form):
            return self._made
        for known, copy in self._versions:
            if known == form:
                return copy
        source = self._made
        if form != REPLICATED and have != REPLICATED:
            source, have = self.copy(REPLICATED), REPLICATED
        with in_graph(self._graph):
            copy = self._replica.convert(source, have, form)
        self.keep(form, copy)
        return copy

    def taken(self, need: Need) -> Any:
        """Returns what an op takes that needs it so."""
        if not isinstance(need, Version):
            return self.copy(need)
        if need == UNUSED:
            return None
        has_local = self.local is not None
        if need == LOCAL:
            return self.local if has_local else self.copy(REPLICATED)
        is_local = has_local and self.fact.form == REPLICATED
        return self.local if is_local else self.copy()

    def waits_for(self, need: Need) -> bool:
        """Whether a communication that others can join comes before what needs it."""
        form = self.fact.form
        is_part = isinstance(form, Sharded) and form.outer == 1
        is_apart = is_part or isinstance(form, Partial | Own)
        if need != REPLICATED or not is_apart or callable(self._made):
            return False
        is_here = self._graph is tf.compat.v1.get_default_graph()
        is_known = any(known == REPLICATED for known, _ in self._versions)
        return is_here and not is_known and self._made.dtype != tf.variant

    @property
    def sent_as(self) -> Form:
        """The form of what is communicated of a value that waits."""
        form = self.fact.form
        return Partial() if isinstance(form, Own) else form

    def sent(self) -> Any:
        """Returns what is communicated of a value that waits."""
        return self._replica.convert(self.copy(), self.fact.form, self.sent_as)

    def keep(self, form: Form, copy: tf.Tensor) -> None:
        """Says what the copy is in another form."""
        self._versions.append((form, copy))


class OfSum(Value):
    """Values computed of a sum over the replicas, which shares a message with others.

    The first one is the value of the op that makes it.

    Args:
        replica: The replica that is being built.
        summand: This replica's.
        finish: Returns the values, given the sum.
    """

    def __init__(
        self,
        replica: Conversions,
        summand: tf.Tensor,
        finish: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    ) -> None:
        super().__init__(replica, Fact(), lambda: self.values[0])
        self._summand, self._finish = summand, finish
        self._values: Sequence[tf.Tensor] = ()

    @property
    def values(self) -> Sequence[tf.Tensor]:
        """All of the values."""
        if not self._values:
            with in_graph(self._graph):
                self._values = self._finish(self._replica.sums([self._summand])[0])
        return self._values

    def waits_for(self, need: Need) -> bool:
        """Whether the sum is still to be taken, for what needs a value."""
        is_here = self._graph is tf.compat.v1.get_default_graph()
        return is_here and need != UNUSED and not self._values

    @property
    def sent_as(self) -> Form:
        """No form: the summand is of no tensor of the graph for one device."""
        return UNSET

    def sent(self) -> Any:
        """Returns the summand."""
        return self._summand

    def keep(self, form: Form, copy: tf.Tensor) -> None:
        """Says what the sum is, or what the value is in another form."""
        if self._values:
            super().keep(form, copy)
        else:
            self._values = self._finish(copy)
