# SPDX-License-Identifier: Apache-2.0
"""Each seeded bug still has its place in the code, and is Python."""

from __future__ import annotations

import ast
import collections

import pytest

from tests.mutants import __main__ as runner

_MUTANTS = runner.mutants()


@pytest.mark.parametrize("mutant", _MUTANTS, ids=lambda mutant: mutant.name)
def test_the_old_text_occurs_once_and_the_new_one_is_another_program(
    mutant: runner.Mutant,
) -> None:
    text = (runner.ROOT / mutant.file).read_text()
    before, after = (ast.dump(ast.parse(x)) for x in (text, mutant.put_into(text)))
    assert before != after


def test_a_text_that_is_gone_or_repeated_is_an_error_with_the_file() -> None:
    mutant = runner.Mutant("name", "a.py", "x", "y", "", ())
    for text, count in (("z", 0), ("x x", 2)):
        with pytest.raises(ValueError, match=f"a.py has the old text of name {count}"):
            mutant.put_into(text)


def test_names_are_unique_and_tests_exist() -> None:
    assert not [
        n for n, k in collections.Counter(m.name for m in _MUTANTS).items() if k > 1
    ]
    runs = [run for mutant in _MUTANTS for run in mutant.tests]
    paths = {path.partition("::")[0] for run in runs for path in run.split()}
    assert [path for path in paths if not (runner.ROOT / path).exists()] == []


def test_each_bug_has_a_row() -> None:
    assert list(runner.read()) == [mutant.name for mutant in _MUTANTS]
