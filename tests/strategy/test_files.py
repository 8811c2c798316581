# SPDX-License-Identifier: Apache-2.0
"""Strategies survive saving and loading; any other input is read, or refused."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from hypothesis import strategies as st

import replicator
from replicator import compressors
from replicator.strategy import (
    AllReduceSynchronizer,
    Node,
    PSSynchronizer,
    Strategy,
    strategy_pb2,
)
from tests import helpers
from tests.strategy import drawn

_QUICK = hypothesis.settings(max_examples=60, deadline=None)
_MADE = Strategy(
    (
        Node("a", PSSynchronizer("CPU:1", True), shape=(2, 3), dtype="float32"),
        Node("b", AllReduceSynchronizer("RING", "bf16", 3), sent=4, seconds=0.5),
        Node.in_parts("c", 1, [2, 1], [PSSynchronizer("CPU:0")] * 2),
    ),
    ("/job:localhost/replica:0/task:0/device:CPU:0",),
)


def _of_text(text: str) -> Strategy:
    """Returns a strategy that is written in protobuf's text format."""
    message = text_format.Parse(text, strategy_pb2.Strategy())  # type: ignore[attr-defined]
    return Strategy.from_bytes(message.SerializeToString())


def _same(one: Strategy, other: Strategy) -> None:
    assert one == other and one.id == other.id
    facts = [
        [(n.shape, n.dtype, n.sent, n.seconds) for n in s.nodes] for s in (one, other)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    "name",
    ["s.pb", "s", "s.json"],
)
def test_a_saved_strategy_is_loaded(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / name
    _MADE.save(path)
    loaded = Strategy.load(path)
    _same(loaded, _MADE)
    assert loaded.path == str(path)
    _same(Strategy.from_file(str(path)), _MADE)


@_QUICK
@hypothesis.given(drawn.strategies())
def test_all_forms_hold_all_of_a_strategy(made: Strategy) -> None:
    _same(Strategy.from_bytes(made.to_bytes()), made)
    _same(Strategy.from_json(made.to_json()), made)
    assert made.id in str(made)


_COMPRESSORS = [
    compressors.PowerSGD(rank=2),
    compressors.ErrorFeedback(compressors.TopK(np.float32(0.25))),
    compressors.BF16(),
]


@pytest.mark.parametrize("compressor", _COMPRESSORS, ids=compressors.text)
def test_compressors_are_saved_as_texts(
    compressor: compressors.Compressor, tmp_path: pathlib.Path
) -> None:
    parts = [PSSynchronizer("CPU:0", compressor=compressor)] * 2
    made = Strategy(
        (
            Node("kernel", AllReduceSynchronizer(compressor=compressor)),
            Node.in_parts("table", 0, [1, 1], parts),
        )
    )
    made.save(tmp_path / "strategy.json")
    loaded = Strategy.load(tmp_path / "strategy.json")
    for node in (loaded.nodes[0], *loaded.nodes[1].parts):
        assert node.synchronizer is not None
        assert compressors.parse(node.synchronizer.compressor) == compressor
    repl = helpers.make(2, variables="mirrored", strategy=loaded)
    with repl.context():
        variables = [tf.Variable(tf.ones([2, 2]), name=n) for n in ("kernel", "table")]
    assert len(repl.strategy.nodes) == len(variables)


def test_a_user_s_compressor_has_no_text(tmp_path: pathlib.Path) -> None:
    class Halves(compressors.Compressor):
        pass

    for compressor in (Halves(), compressors.ErrorFeedback(Halves())):
        how = AllReduceSynchronizer(compressor=compressor)
        with pytest.raises(
            replicator.StrategyError,
            match="(?s)variable w cannot be written, but .*Halves.*Fix: use one of",
        ):
            Strategy((Node("w", how),)).save(tmp_path / "strategy.pb")
    assert not list(tmp_path.iterdir())


def test_a_strategy_of_autodist_s_fields_is_read() -> None:
    text = """
      id: "20200101T000000M000000"
      node_config { var_name: "W" PSSynchronizer { reduction_destination: "CPU:0" } }
      node_config { var_name: "b" AllReduceSynchronizer { spec: RING group: 1 } }
      node_config {
        var_name: "e" partitioner: "1,2,1"
        part_config { var_name: "e/part_0" AllReduceSynchronizer {} }
        part_config { var_name: "e/part_1" AllReduceSynchronizer {} }
      }
      graph_config { replicas: "GPU:0" replicas: "GPU:1" }
    """
    parsed = _of_text(text)
    assert parsed.id == "20200101T000000M000000"
    assert parsed.replicas == ("GPU:0", "GPU:1")
    assert parsed.node("W") == Node("W", PSSynchronizer("CPU:0"))  # sync by default
    assert parsed.node("b") == Node("b", AllReduceSynchronizer("RING", "", 1))
    parts = parsed.node("e")
    assert parts is not None and parts.axis == 1
    assert parts.extents(5) == (3, 2)


@_QUICK
@hypothesis.given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_strategy(data: bytes) -> None:
    for read in (Strategy.from_bytes, Strategy.from_json):
        try:
            parsed = read(data)  # type: ignore[operator]
        except replicator.StrategyError as error:
            assert "there is no strategy in" in str(error) or ", " in str(error)
        else:
            _same(Strategy.from_bytes(parsed.to_bytes()), parsed)


@_QUICK
@hypothesis.given(drawn.strategies(), st.data())
def test_a_damaged_protobuf_is_refused_or_is_a_strategy(
    made: Strategy, data: st.DataObject
) -> None:
    damaged = bytearray(made.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    try:
        read = Strategy.from_bytes(bytes(damaged))
    except replicator.StrategyError:
        return
    _same(Strategy.from_json(read.to_json()), read)
    assert str(read)


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats()
_KEYS = st.sampled_from(
    ["id", "node_config", "graph_config", "replicas", "var_name", "PSSynchronizer"]
    + ["AllReduceSynchronizer", "partitioner", "part_config", "sizes", "spec", "group"]
    + ["sync", "staleness", "shape", "dtype", "x"]
)


@_QUICK
@hypothesis.given(
    st.dictionaries(
        _KEYS,
        st.recursive(
            _LEAVES,
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4)
            ),
        ),
    )
)
def test_random_json_is_refused_or_is_a_strategy(known: dict[str, Any]) -> None:
    try:
        parsed = Strategy.from_json(json.dumps(known))
    except replicator.StrategyError:
        return
    _same(Strategy.from_bytes(parsed.to_bytes()), parsed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('node_config { var_name: "w" }', "'w' has no synchronizer"),
        ("node_config { AllReduceSynchronizer {} }", "name ''"),
        (
            'node_config { var_name: "w" AllReduceSynchronizer {} } ' * 2,
            "two nodes for variable w",
        ),
        (
            'node_config { var_name: "w" AllReduceSynchronizer { spec: 7 } }',
            "spec|enum",
        ),
        ('node_config { var_name: "w" PSSynchronizer {} }', "destination=''"),
        (
            'node_config { var_name: "w" partitioner: "2,2" AllReduceSynchronizer {} }',
            "partitioner '2,2'; only one axis may have parts",
        ),
        (
            'node_config { var_name: "w" partitioner: "a" AllReduceSynchronizer {} }',
            "partitioner 'a'",
        ),
        (
            'node_config { var_name: "w" partitioner: "1,3" AllReduceSynchronizer {} }',
            "partitioner '1,3' and 0 parts",
        ),
        (
            'node_config { var_name: "w" sizes: 2 AllReduceSynchronizer {} }',
            "sizes of parts but no parts",
        ),
        (
            'node_config { var_name: "w" dtype: "float32" shape: -1 '
            "AllReduceSynchronizer {} }",
            r"shape \[-1\]",
        ),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, said: str) -> None:
    with pytest.raises(replicator.StrategyError, match=f"(?s){said}"):
        _of_text(text)


def test_what_is_no_field_of_a_strategy_is_said() -> None:
    said = "there is no strategy in this text: ParseError.*nodes"
    with pytest.raises(replicator.StrategyError, match=f"(?s){said}"):
        Strategy.from_json('{"nodes": []}')


@pytest.mark.parametrize("given", [None, 3, ["x"], b"\xff\xfe"])
def test_what_is_no_text_is_refused(given: Any) -> None:
    with pytest.raises(replicator.StrategyError, match="there is no strategy in"):
        Strategy.from_json(given)
    if not isinstance(given, bytes):
        with pytest.raises(replicator.StrategyError, match="expected bytes"):
            Strategy.from_bytes(given)


def test_an_empty_file_is_no_strategy(tmp_path: pathlib.Path) -> None:
    for name in ("empty.pb", "empty.json"):
        path = tmp_path / name
        path.write_text("" if name == "empty.pb" else "\n")
        message = f"there is no strategy in the file .*{name}.*Fix: correct it, or have"
        with pytest.raises(replicator.StrategyError, match=f"(?s){message}"):
            Strategy.load(path)


def test_what_no_protobuf_can_hold_is_refused(tmp_path: pathlib.Path) -> None:
    odd = Strategy((Node("\udc80", AllReduceSynchronizer()),))
    for write in (odd.to_bytes, odd.to_json, lambda: odd.save(tmp_path / "s")):
        with pytest.raises(replicator.StrategyError, match="cannot be written"):
            write()
    with pytest.raises(replicator.StrategyError, match="cannot be saved as"):
        _MADE.save("\udc80")


def test_files_that_cannot_be_used_are_named(tmp_path: pathlib.Path) -> None:
    nowhere = tmp_path / "no" / "s.pb"
    with pytest.raises(replicator.StrategyError, match=re.escape(str(nowhere))):
        _MADE.save(nowhere)
    with pytest.raises(replicator.StrategyError, match="(?s)s.pb.*NotFound|No such"):
        Strategy.load(nowhere)
    broken = tmp_path / "s.json"
    broken.write_text('{"node_config": [{"var_name": "w"}]}')
    with pytest.raises(replicator.StrategyError, match="(?s)the file .*s.json.*'w'"):
        Strategy.load(broken)
    for bad in (None, 3):
        with pytest.raises(replicator.StrategyError, match="Fix: pass the path"):
            Strategy.load(bad)  # type: ignore[arg-type]


def test_the_generated_code_is_that_of_the_proto() -> None:
    # Compared field by field, as `make proto` needs a network.
    text = (pathlib.Path(strategy_pb2.__file__).parent / "strategy.proto").read_text()
    descriptor: Any = strategy_pb2.DESCRIPTOR  # type: ignore[attr-defined]
    for name, message in descriptor.message_types_by_name.items():
        body = text.partition(f"message {name} {{")[2].partition("\n}")[0]
        fields = re.findall(r"(?m)^ +(?:repeated |optional )?\w+ (\w+) = (\d+);", body)
        numbers = {(field, int(number)) for field, number in fields}
        enum = {("AUTO", 0)} if name == "AllReduceSynchronizer" else set()
        assert numbers - enum == {(f.name, f.number) for f in message.fields}, name
    assert text_format.MessageToString(strategy_pb2.Strategy(id="x")) == 'id: "x"\n'  # type: ignore[attr-defined]
