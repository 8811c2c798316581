# SPDX-License-Identifier: Apache-2.0
"""Two hosts: `python -m benchmarks.hosts [--links=1gbit,loopback] [--only=64MiB]`.

The hosts are network namespaces of this machine, joined by a link of 1 Gbit/s, which
needs root; or two processes on loopback. One program uses the devices of both, with
`python -m replicator.serve` on each; another runs one program per host. They are
compared with plain TensorFlow on one remote device and on both hosts with nothing sent,
torch's DistributedDataParallel and gloo, and plain sockets. All contenders take turns.
torch lives in a separate environment, which `make bench-hosts` makes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from benchmarks import allreduce, cli, results, timing
from benchmarks.contenders import MIRRORED, OURS
from benchmarks.on_hosts import namespaces, turns
from benchmarks.on_hosts.between import BETWEEN
from benchmarks.on_hosts.in_graph import NOTHING_SENT, ONE_REMOTE, WORKLOADS
from benchmarks.on_hosts.namespaces import Host
from benchmarks.tables import Table, milliseconds

_LINKS = flags.DEFINE_list("links", None, "Which links; by default all.")
_TORCH = flags.DEFINE_string(
    "torch", None, "The Python that has torch; by default torch is left out."
)

NAME = "hosts"
WIRE, LOOPBACK = "1gbit", "loopback"
LINKS = {WIRE: "1 Gbit/s", LOOPBACK: "loopback"}
NETWORKS = ("small", "large")
SIZES = {name: allreduce.SIZES[name] for name in ("4KiB", "1MiB", "64MiB")}
DEFAULT = ("large", *SIZES)
QUICK = ("small", "4KiB", "1MiB")
DDP, GLOO = "torch DDP", "gloo"
SOCKETS = "plain sockets"
# The in-graph contenders of a network compute the same losses.
IN_GRAPH = (ONE_REMOTE, OURS, MIRRORED)
_WARM_UP = 3
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
_TORCH_PORT, _WIRE_PORT, _BETWEEN_PORT = 29500, 29501, 29510
# In namespaces all ports are free.

# Indexed by cell, then by contender.
Runs = dict[str, dict[str, timing.Run]]


# --- The programs ---------------------------------------------------------------------


@contextlib.contextmanager
def in_graph(hosts: Sequence[Host], cells: Sequence[str]) -> Iterator[Runs]:
    """Yields Replicator in one program, with a server on each host."""
    serve = (sys.executable, "-m", "replicator.serve", "--watch=stdin")
    exposed = [] if hosts[0].namespace is None else ["--insecure"]
    commands = [(*serve, f"--host={host.address}", *exposed) for host in hosts]
    with turns.running("replicator.serve", hosts, commands, _ENVIRONMENT) as servers:
        arguments = {
            "hosts": [facts["address"] for facts in servers.said()],
            "client": f"{hosts[0].address}:0",
            "cells": list(cells),
        }
        module = "benchmarks.on_hosts.in_graph"
        command = (sys.executable, "-m", module, json.dumps(arguments))
        with turns.running(OURS, hosts[:1], [command], _ENVIRONMENT) as program:
            yield _runs(program, cells, IN_GRAPH, (NOTHING_SENT, OURS))


@contextlib.contextmanager
def between(hosts: Sequence[Host], cells: Sequence[str]) -> Iterator[Runs]:
    """Yields Replicator with a program on each host."""
    addresses = [
        f"{host.address}:{_free_port([host], _BETWEEN_PORT + k)}"
        for k, host in enumerate(hosts)
    ]
    arguments = {"hosts": addresses, "cells": list(cells)}
    module = ("-m", "benchmarks.on_hosts.between")
    commands = [
        (sys.executable, *module, json.dumps({**arguments, "task": task}))
        for task in range(len(hosts))
    ]
    with turns.running(BETWEEN, hosts, commands, _ENVIRONMENT) as program:
        yield _runs(program, cells, (BETWEEN,), (BETWEEN,))


@contextlib.contextmanager
def sockets(hosts: Sequence[Host], cells: Sequence[str]) -> Iterator[Runs]:
    """Yields plain sockets."""
    port = str(_free_port(hosts, _WIRE_PORT))
    sizes = [f"{c}/{SOCKETS}={n}" for c, n in SIZES.items() if c in cells]
    module = ("-m", "benchmarks.on_hosts.wire")
    commands = [
        (sys.executable, *module, str(rank), hosts[0].address, port, *sizes)
        for rank in range(len(hosts))
    ]
    with turns.running(SOCKETS, hosts, commands) as program:
        yield _runs(program, cells, (), (SOCKETS,))


@contextlib.contextmanager
def torch(hosts: Sequence[Host], cells: Sequence[str]) -> Iterator[Runs]:
    """Yields torch, or nothing without --torch."""
    if _TORCH.value is None:
        yield {}
        return
    arguments = {
        "meet": f"tcp://{hosts[0].address}:{_free_port(hosts, _TORCH_PORT)}",
        "networks": [cell for cell in cells if cell in NETWORKS],
        "sizes": {cell: SIZES[cell] for cell in cells if cell in SIZES},
    }
    python = str(cli.REPOSITORY / _TORCH.value)
    module = (python, "-m", "benchmarks.peers.torch_hosts")
    commands = [
        (*module, json.dumps({**arguments, "rank": rank})) for rank in range(len(hosts))
    ]
    environment = {"GLOO_SOCKET_IFNAME": hosts[0].interface}
    with turns.running("torch", hosts, commands, environment) as program:
        yield _runs(program, cells, (DDP,), (GLOO,))


# Each yields the runs that its processes offer for these cells on these hosts.
PROGRAMS = (in_graph, between, sockets, torch)


def _runs(
    program: turns.Program,
    cells: Sequence[str],
    trained: Sequence[str],
    added: Sequence[str],
) -> Runs:
    """Returns a program's contenders, for networks and for sums."""
    return {
        cell: {
            name: program.run(f"{cell}/{name}")
            for name in (added if cell in SIZES else trained)
        }
        for cell in cells
    }


def _free_port(hosts: Sequence[Host], within: int) -> int:
    """Returns a free port of the first host."""
    if hosts[0].namespace is not None:
        return within
    with socket.socket() as probe:
        probe.bind((hosts[0].address, 0))
        return int(probe.getsockname()[1])


# --- Measuring ------------------------------------------------------------------------


@contextlib.contextmanager
def joined(link: str) -> Iterator[Sequence[Host]]:
    """Yields the two hosts of a link."""
    if link == LOOPBACK:
        yield namespaces.LOOPBACK
        return
    with contextlib.ExitStack() as stack:
        # Namespaces outlive their process, so SIGTERM must unwind this block.
        before = signal.signal(signal.SIGTERM, lambda n, _: sys.exit(128 + n))
        stack.callback(signal.signal, signal.SIGTERM, before)
        try:
            hosts = stack.enter_context(namespaces.linked(link))
        except namespaces.Unavailable as error:
            cli.fail(
                f"no hosts joined by {LINKS[link]} here: {error}; "
                f"--links={LOOPBACK} needs none"
            )
        yield hosts


def measure(link: str, cells: Sequence[str]) -> dict[str, Any]:
    """Measures all contenders on a link.

    Returns:
        `found[cell][contender]`, each a Measured as a dict.
    """
    measurements = {}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(joined(link))
        programs = [stack.enter_context(make(hosts, cells)) for make in PROGRAMS]
        for cell in cells:
            cli.progress(f"hosts: measuring {cell}, {LINKS[link]} ...")
            runs = {n: r for runs in programs for n, r in runs.get(cell, {}).items()}
            by_default = (
                allreduce.steps(SIZES[cell]) if cell in SIZES else WORKLOADS[cell].steps
            )
            measured = timing.measure(
                runs, cli.steps(by_default), cli.rounds(), _WARM_UP
            )
            ours = [name for name in IN_GRAPH if name in measured]
            if not timing.agree(measured, ours):
                losses = {name: measured[name].losses for name in ours}
                cli.fail(f"{cell}: different losses, {losses}")
            measurements[cell] = {
                k: dataclasses.asdict(measurement)
                for k, measurement in measured.items()
            }
    return measurements


# --- The tables -----------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns a table of steps and one of sums, for each link.

    Args:
        found: `found[link][cell][contender]` is a Measured as a dict.
    """
    result = []
    for link, by_cell in found.items():
        measured = {
            cell: {n: timing.Measured.from_json(m) for n, m in by_name.items()}
            for cell, by_name in by_cell.items()
        }
        trained = {WORKLOADS[c].title: m for c, m in measured.items() if c in NETWORKS}
        summed = {cell: m for cell, m in measured.items() if cell in SIZES}
        if trained:
            title = f"A step on two hosts, {LINKS[link]}, in ms"
            ratios = [(name, ONE_REMOTE) for name in (OURS, MIRRORED, BETWEEN)]
            ratios += [(DDP, OURS), (DDP, BETWEEN)]
            names = (*IN_GRAPH, BETWEEN, DDP)
            result.append(_table(title, trained, names, ratios, ONE_REMOTE))
        if summed:
            title = f"All-reduce between two hosts, {LINKS[link]}, in ms"
            ratios = [(a, b) for a in (OURS, BETWEEN) for b in (SOCKETS, GLOO)]
            ratios.append((NOTHING_SENT, GLOO))
            names = (NOTHING_SENT, SOCKETS, OURS, BETWEEN, GLOO)
            result.append(_table(title, summed, names, ratios, SOCKETS))
    return result


def _table(
    title: str,
    rows: Mapping[str, Mapping[str, timing.Measured]],
    names: Sequence[str],
    ratios: Sequence[tuple[str, str]],
    noise: str,
) -> Table:
    columns = [n for n in names if any(n in row for row in rows.values())]
    ratios = [(a, b) for a, b in ratios if {a, b} <= set(columns)]
    return Table(
        title,
        ["", *columns, *(f"{a} / {b}" for a, b in ratios), "noise"],
        [
            [
                row,
                *(f"{milliseconds(m[name].median)}" for name in columns),
                *(f"{timing.ratio(m[a], m[b]):.2f}" for a, b in ratios),
                f"{m[noise].spread:.1%}",
            ]
            for row, m in rows.items()
        ],
        f"Medians. All share the cores of this machine. Noise: of {noise}.",
    )


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    by_default = QUICK if cli.QUICK.value else DEFAULT
    cells = cli.choose(cli.ONLY.value or by_default, (*NETWORKS, *SIZES))
    links = cli.choose(_LINKS.value, LINKS)
    if _TORCH.value is not None and not (cli.REPOSITORY / _TORCH.value).exists():
        cli.fail(f"--torch={_TORCH.value} does not exist; `make bench-hosts` makes it")
    about = results.facts()
    measurements = {link: measure(link, cells) for link in links}
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
