# SPDX-License-Identifier: Apache-2.0
"""The tests that an option refuses by name, in tests/refused.txt.

A variable with one owner does not support every write, and clones are fed one shape. A
test that is listed under an option must end in that option's error when it runs with
it, and any other must pass. So no other error passes as a skip, and no entry outlives
its reason. What asks which replica it is, which clones are not told, need not be
listed: that error comes from nothing else.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from replicator import errors

LIST = pathlib.Path(__file__).with_name("refused.txt")
_HEAD = """\
# Tests that do what an option refuses by name: with it, they must end in its error.
# A line is a test, all cases of a test, or all tests of a file; see tests/refusals.py.
# `pytest --with OPTION --note-refused` lists anew what it runs.
"""


def refuses(option: str, error: BaseException | None) -> bool:
    """Whether an error is one by which an option refuses a program."""
    if option == "build=clone":
        return isinstance(error, errors.CloneError)
    return (
        option == "variables=sharded"
        and isinstance(error, errors.UnsupportedError)
        and 'variables="mirrored"' in str(error)
    )


def asked(option: str, error: BaseException | None) -> bool:
    """Whether a program asked for what an option does not tell it.

    The error is part of another one's text where the test expects another.
    """
    said = "cannot be known: step_fn is called once"
    return option == "build=clone" and said in str(error)


class Refused:
    """The list: for each option, the tests that it refuses.

    Args:
        entries: By option.
    """

    def __init__(self, entries: dict[str, set[str]]) -> None:
        self.entries = entries

    @classmethod
    def read(cls) -> Refused:
        """Reads the list."""
        entries: dict[str, set[str]] = {}
        option = ""
        for line in LIST.read_text().splitlines():
            if line.startswith("["):
                option = line.strip("[]")
            elif line and not line.startswith("#"):
                entries.setdefault(option, set()).add(line)
        return cls(entries)

    def options(self, test: str, chosen: Iterable[str]) -> list[str]:
        """Returns those of the chosen options under which a test is listed."""
        function = test.partition("[")[0]
        names = {test, function, function.partition("::")[0]}
        return [o for o in chosen if names & self.entries.get(o, set())]

    def note(self, option: str, outcomes: dict[str, bool]) -> None:
        """Updates the list with the outcomes of some tests.

        Args:
            option: The option that they ran with.
            outcomes: For each test, whether it was refused.
        """
        functions: dict[str, list[str]] = {}
        for test in outcomes:
            functions.setdefault(test.partition("[")[0], []).append(test)
        old = self.entries.get(option, set())
        new = {entry for entry in old if entry.partition("[")[0] not in functions}
        for function, tests in functions.items():
            refused = [test for test in tests if outcomes[test]]
            new.update([function] if refused == tests else refused)
        self.entries[option] = new
        LIST.write_text(_HEAD + "".join(map(self._section, sorted(self.entries))))

    def _section(self, option: str) -> str:
        return "\n".join(["", f"[{option}]", *sorted(self.entries[option]), ""])


def verdict(
    listed: Sequence[str], chosen: Sequence[str], error: BaseException | None
) -> str:
    """Returns the problem with the outcome of a test that ran with options, or "".

    Args:
        listed: The options under which it is listed.
        chosen: The options with which it ran.
        error: The test's exception, if any.
    """
    if any(refuses(option, error) for option in listed):
        return ""
    if listed:
        return f"is listed in {LIST.name} under {listed[0]}, which did not refuse it"
    refusing = [o for o in chosen if refuses(o, error) and not asked(o, error)]
    if refusing:
        return f"is refused by {refusing[0]}, and not listed under it in {LIST.name}"
    return ""
