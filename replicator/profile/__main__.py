# SPDX-License-Identifier: Apache-2.0
"""Measures a step and predicts when more replicas pay: `python -m replicator.profile`.

`make()` returns (repl, step_fn), (repl, step_fn, input_fn), or what `repl.build`
returned, as for `python -m replicator.plan`. It is called twice: as written, and with
one replica whose batch is as large; batches that are shares of a global one must use
`ctx.per_replica_batch_size` or `input_mode="global_batch"`. Steps of both are run and
measured. If the program fails with one replica, as a pipeline does whose stages are
replicas, it is measured as written, and nothing is predicted. The module's own flags,
defined with absl or argparse, go after `--`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from replicator import command_line, errors
from replicator import strategy as strategies
from replicator.costs import rates
from replicator.plan import programs
from replicator.profile import chrome, measure, parts, traces
from replicator.profile import report as reports
from replicator.report import files

_USAGE = (
    "python -m replicator.profile module:make [--strategy=NAME] [--bandwidth=GBITS] "
    "[--latency=US] [--calibration=FILE] [--trials=N] [--json=PATH] [--plot=PATH] "
    "[--trace=PATH] [-- FLAGS OF THE MODULE]"
)
_MOST_TRIALS = 10**6
# Apart from the flags of the module, which may have the same names.
PROGRAM_FLAGS = flags.FlagValues()
_STRATEGY = flags.DEFINE_string(
    "strategy",
    None,
    "A builder of replicator.strategy, or the file of a strategy.",
    flag_values=PROGRAM_FLAGS,
)
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth",
    None,
    "The bandwidth of the network between hosts, in Gbit/s.",
    flag_values=PROGRAM_FLAGS,
)
_LATENCY = flags.DEFINE_float(
    "latency",
    None,
    "The latency of a message between hosts, in microseconds.",
    flag_values=PROGRAM_FLAGS,
)
_CALIBRATION = flags.DEFINE_string(
    "calibration",
    None,
    "A file that `python -m replicator.calibrate --output` wrote.",
    flag_values=PROGRAM_FLAGS,
)
_TRIALS = flags.DEFINE_integer(
    "trials",
    40,
    "How many steps to measure.",
    1,
    _MOST_TRIALS,
    flag_values=PROGRAM_FLAGS,
)
_JSON = flags.DEFINE_string(
    "json",
    None,
    "A file to write all numbers to, as JSON.",
    flag_values=PROGRAM_FLAGS,
)
_PLOT = flags.DEFINE_string(
    "plot",
    None,
    "A .png or .svg file to plot the profile to.",
    flag_values=PROGRAM_FLAGS,
)
_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "A .json file to write a trace to, for chrome://tracing or Perfetto.",
    flag_values=PROGRAM_FLAGS,
)


@command_line.interruptible
def main(argv: Sequence[str]) -> int:
    """Measures, predicts, prints and writes; returns the exit status."""
    try:
        names, arguments = command_line.split(argv)
        if len(names) != 1:
            raise command_line.BadInput(f"usage: {_USAGE}")
        picture = _PLOT.value
        if picture is not None:
            programs.attempt(
                "--plot", lambda: files.check_picture("a profile", picture)
            )
        command_line.check_outputs(_JSON, _PLOT, _TRACE)
        calibration = programs.attempt(
            "--calibration", lambda: rates.load(_CALIBRATION.value)
        )
        network, strategy = _network(calibration), _strategy(_STRATEGY.value)
        measured, ran = _measured(names[0], arguments, strategy)
        calibration, source = programs.attempt(
            "the calibration", lambda: measure.calibrated(measured.devices, calibration)
        )
        report = reports.report(
            names[0],
            measured,
            calibration,
            network,
            strategy="" if strategy is None else repr(strategy),
            source=source,
        )
        programs.attempt("the tables", lambda: _show(report))
        if _JSON.value is not None:
            _write(_JSON, report.to_json())
        if _TRACE.value is not None:
            _write(_TRACE, chrome.to_json(ran, measured.rows))
        if picture is not None:
            programs.attempt("--plot", lambda: _plot(report, picture))
    except command_line.BadInput as error:
        return command_line.fail(error)
    return 0


def _measured(
    name: str, arguments: Sequence[str], strategy: Any
) -> tuple[parts.Measured, list[traces.Ran]]:
    """Builds and measures the named program, as written and on one replica."""
    step, make = f"the step of {name}", lambda: programs.load_step(name, arguments)
    whole = programs.attempt(step, lambda: measure.whole(make, strategy))
    single, needs_all = None, ""
    try:
        single = programs.attempt(step, lambda: measure.single_replica(make, whole))
    except command_line.BadInput as error:
        needs_all = errors.one_line(error)
    return programs.attempt(
        step, lambda: measure.measure(whole, single, _TRIALS.value, needs_all)
    )


def _network(calibration: rates.Calibration) -> rates.Rates:
    """Returns the rates between hosts: as calibrated, or as set by flags."""
    network = calibration.of("hosts")
    bandwidth = _positive(_BANDWIDTH)
    if bandwidth is not None:
        network = dataclasses.replace(network, link=8e-9 / bandwidth)
    latency = _positive(_LATENCY)
    if latency is not None:
        network = dataclasses.replace(network, message=latency * 1e-6)
    return network


def _positive(flag: flags.FlagHolder[float | None]) -> float | None:
    value = flag.value
    if value is not None and not 0 < value < math.inf:
        raise command_line.BadInput(
            f"--{flag.name} was given {value}; expected a finite number above 0"
        )
    return value


def _strategy(name: str | None) -> Any:
    """Returns the strategy named by a flag, or None."""
    if name is None:
        return None
    builders = {
        public: value
        for public in strategies.__all__
        if isinstance(value := getattr(strategies, public), type)
        and issubclass(value, strategies.Builder)
        and value not in (strategies.Builder, strategies.Rules)
    }
    if name in builders:
        return programs.attempt(f"--strategy={name}", builders[name])
    if os.path.exists(name):
        return programs.attempt("--strategy", lambda: strategies.Strategy.load(name))
    raise command_line.BadInput(
        f"--strategy was given {name!r}; expected the file of a strategy, or one of "
        f"{', '.join(sorted(builders))}"
    )


def _write(flag: flags.FlagHolder[str | None], text: str) -> None:
    path = pathlib.Path(flag.value or "")
    programs.attempt(f"--{flag.name}", lambda: path.write_text(text))


def _show(report: reports.Report) -> None:
    with files.needing("rich", "print a profile"):
        from replicator.profile import display
    display.show(report)


def _plot(report: reports.Report, path: str) -> None:
    with files.needing("matplotlib", "plot a profile"):
        from replicator.profile import picture
    picture.plot(report, path)


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: command_line.parse(argv, PROGRAM_FLAGS))
