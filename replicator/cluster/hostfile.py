# SPDX-License-Identifier: Apache-2.0
"""Reads hostfiles in the format of mpirun and horovodrun, and mpirun's variables."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from replicator import errors
from replicator.cluster import addresses, description
from replicator.launch import hostfile

# mpirun sets no variable that lists the hosts, but one may name its hostfile.
MPIRUN_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "PRTE_MCA_default_hostfile",
)
_RANK = "OMPI_COMM_WORLD_RANK"
_LARGEST = 1 << 20  # bytes; a larger file is no hostfile
_PRIVILEGED = 1024


def read(path: str | os.PathLike[str], source: str) -> description.Description:
    """Returns the hosts that a file lists.

    Args:
        path: A file of lines "host", "host:port" or "host slots=2"; a "#" begins a
            comment. A server has as many CPU devices as slots.
        source: Where the path is from, for messages.

    Raises:
        ClusterError: The file cannot be read, or is no such list.
    """
    where = f"{source} ({quoted_path(path)})"
    try:
        lines = hostfile.lines(text_of(path, where))
    except hostfile.HostfileError as error:
        raise description.wrong(
            f"line {error.number} of {where}", str(error), 'write "host slots=2"'
        ) from None
    hosts = [_host(line, f"line {line.number} of {where}") for line in lines]
    return description.checked(description.Description(tuple(hosts), where))


def describe_mpirun(
    environment: Mapping[str, str],
) -> description.Description | None:
    """Returns the hosts of mpirun's hostfile; None outside of mpirun.

    Args:
        environment: The environment variables of this process.

    Raises:
        ClusterError: This is not the first process, or no variable names the hostfile.
    """
    rank = environment.get(_RANK)
    if rank is None:
        return None
    if rank != "0":
        raise description.wrong(
            "mpirun",
            f"this is process {rank} of its program, but only one connects to all "
            "hosts",
            "start the program once beside the servers: `mpirun -np 1 python train.py "
            ": -np 2 python -m replicator.serve --port=8888 ...`",
        )
    for variable in MPIRUN_FILES:
        if environment.get(variable):
            return read(environment[variable], variable)
    raise description.wrong(
        "mpirun",
        f"its variables do not name the hosts, except for {MPIRUN_FILES[0]}",
        "name mpirun's hostfile in REPLICATOR_HOSTFILE=path, too, or pass "
        'hosts=["host:port", ...]',
    )


_LONGEST = 1000  # characters of a path in a message


def quoted_path(path: str | os.PathLike[str]) -> str:
    """Returns a path for messages; quoted if it is long, empty or not printable."""
    text = os.fsdecode(path)
    readable = text and text.isprintable() and len(text) <= _LONGEST
    return text if readable else errors.repr_of(text)


def text_of(path: str | os.PathLike[str], where: str) -> str:
    """Returns the text of a file.

    Args:
        path: The file.
        where: What the file is, for messages.

    Raises:
        ClusterError: The file cannot be read, or is not text.
    """
    try:
        if not pathlib.Path(path).is_file():
            raise FileNotFoundError("there is no such file")
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it is longer than {_LARGEST} bytes")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise description.wrong(
            where,
            f"it cannot be read: {errors.one_line(error)}",
            "name a readable text file",
        ) from None


def _host(line: hostfile.Line, where: str) -> description.Host:
    name = line.host
    try:
        port = addresses.split(name)[1]
    except ValueError as error:
        raise description.wrong(where, str(error)) from None
    if port is not None and port < _PRIVILEGED:
        raise description.wrong(
            where,
            f"{errors.repr_of(name)} names port {port}, which only the system may use",
            f'if {port} is the number of replicas, write "slots={port}"',
        )
    return description.Host(name=name, address=name, cpus=line.slots)
