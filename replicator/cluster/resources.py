# SPDX-License-Identifier: Apache-2.0
"""`ResourceSpec`: reads a YAML file of hosts and of how to reach them.

Source: the resource specification of AutoDist, https://github.com/petuum/autodist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from replicator import errors
from replicator.cluster import description, hostfile

_MOST_DEVICES = 1024  # per host
_FASTEST = 1e6  # Gbit/s
_NODE = ("address", "cpus", "gpus", "chief", "ssh_config", "network_bandwidth")
_SSH = ("username", "port", "python_venv", "key_file", "shared_envs")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ResourceSpec:
    """The hosts that a YAML file describes, in AutoDist's form.

    ```yaml
    nodes:
      - address: 10.0.0.1    # with ":port" if its server does not listen at 8888
        chief: true          # runs the program
        cpus: [0, 1]         # [0] unless given
      - address: 10.0.0.2
        gpus: [0, 1]
        ssh_config: others
        network_bandwidth: 10    # Gbit/s, 1 unless given
    ssh:
      others:
        username: me
        port: 22
        key_file: ~/.ssh/id_ed25519
        python_venv: source ~/venv/bin/activate
        shared_envs: {LD_LIBRARY_PATH: /usr/local/cuda/lib64}
    ```

    Example:
        >>> text = "nodes: [{address: 127.0.0.1, cpus: [0, 1]}]"
        >>> _ = pathlib.Path("cluster.yml").write_text(text)
        >>> replicator.ResourceSpec("cluster.yml").devices
        ('127.0.0.1:CPU:0', '127.0.0.1:CPU:1')

    Args:
        path: The file.

    Raises:
        ClusterError: The file cannot be read, or a field is missing, unknown or
            impossible.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or isinstance(path, bytes):
            raise errors.ClusterError(
                f"ResourceSpec was given {errors.repr_of(path)}.",
                fix="pass the path of a YAML file.",
            )
        self._where = hostfile.quoted_path(path)
        facts = _load(hostfile.text_of(path, self._where), self._where)
        self._nodes = _parse(facts, self._where)
        hosts = tuple(node for node, _ in self._nodes)
        self._description = description.checked(
            description.Description(hosts, self._where)
        )

    @property
    def description(self) -> description.Description:
        """The hosts, for `connect` and for the launcher.

        Example:
            >>> _ = pathlib.Path("cluster.yml").write_text("nodes: [{address: a}]")
            >>> replicator.ResourceSpec("cluster.yml").description.hosts[0].address
            'a:8888'
        """
        return self._description

    @property
    def devices(self) -> tuple[str, ...]:
        """All GPUs, and all CPUs of hosts without GPUs, as "address:GPU:0".

        Example:
            >>> _ = pathlib.Path("cluster.yml").write_text("nodes: [{address: a}]")
            >>> replicator.ResourceSpec("cluster.yml").devices
            ('a:CPU:0',)
        """
        return tuple(
            f"{node.name}:{device}"
            for node, devices in self._nodes
            for device in devices
        )

    @property
    def by_host(self) -> tuple[tuple[str, ...], ...]:
        """The `devices` of each host, without its address.

        Example:
            >>> text = "nodes: [{address: 127.0.0.1, cpus: [0, 1]}]"
            >>> _ = pathlib.Path("cluster.yml").write_text(text)
            >>> replicator.ResourceSpec("cluster.yml").by_host
            (('CPU:0', 'CPU:1'),)
        """
        return tuple(devices for _, devices in self._nodes)

    @property
    def chief(self) -> str:
        """The address of the host on which the program runs.

        Example:
            >>> _ = pathlib.Path("cluster.yml").write_text("nodes: [{address: a}]")
            >>> replicator.ResourceSpec("cluster.yml").chief
            'a'
        """
        return next(node.name for node, _ in self._nodes if node.chief)

    def __repr__(self) -> str:
        return f"ResourceSpec({self._where!r})"


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of a node; called by yaml."""
        if not isinstance(node, yaml.MappingNode):
            return super().construct_mapping(node, deep)  # raises
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, str) and keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise description.wrong(
            where, f"it is not YAML: {errors.summary(error)}"
        ) from None


def _parse(facts: Any, where: str) -> list[tuple[description.Host, tuple[str, ...]]]:
    """Returns each node's host and the devices of its replicas."""
    top = _mapping(facts, ("nodes", "ssh"), where, "the file")
    nodes = top.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise description.wrong(
            where, '"nodes" is not a list of hosts', "write nodes: [{address: host-a}]"
        )
    groups = top.get("ssh") or {}
    if not isinstance(groups, Mapping):
        raise description.wrong(where, '"ssh" is not a mapping of names to settings')
    ssh = {
        name: _ssh(group, f"{where}, ssh {name!r}") for name, group in groups.items()
    }
    hosts = [
        _node(node, k, ssh, len(nodes) == 1, where) for k, node in enumerate(nodes)
    ]
    _check([host for host, _ in hosts], where)
    return hosts


def _node(
    facts: Any,
    index: int,
    groups: Mapping[Any, description.Ssh],
    single: bool,
    where: str,
) -> tuple[description.Host, tuple[str, ...]]:
    at = f"{where}, node {index}"
    node = _mapping(facts, _NODE, at, "it")
    address = node.get("address")
    if not isinstance(address, str):
        raise description.wrong(
            at,
            f'"address" is {_quoted(address)}, which is not an address',
            "write address: host-a, in quotes if it is a number",
        )
    chief = node.get("chief", single)
    if not isinstance(chief, bool):
        raise description.wrong(at, f'"chief" is {_quoted(chief)}, not true or false')
    name = node.get("ssh_config")
    if name is not None and (not isinstance(name, str) or name not in groups):
        names = ", ".join(map(str, groups)) or "none"
        raise description.wrong(
            at, f'"ssh_config" is {_quoted(name)}; under "ssh" there are: {names}'
        )
    cpus, gpus = _indices(node, "cpus", at), _indices(node, "gpus", at)
    if cpus == ():
        raise description.wrong(at, '"cpus" is empty', "leave it out for [0]")
    cpus = cpus or (0,)
    host = description.Host(
        name=address,
        address=address,
        cpus=max(cpus) + 1,
        gpus=max(gpus) + 1 if gpus else 0,
        chief=chief,
        bandwidth=_bandwidth(node.get("network_bandwidth", 1), at),
        ssh=None if name is None else groups[name],
    )
    used = [f"GPU:{k}" for k in gpus or ()] or [f"CPU:{k}" for k in cpus]
    return host, tuple(used)


def _check(hosts: Sequence[description.Host], where: str) -> None:
    """Checks the rules across nodes: one chief, and ssh for all other hosts."""
    chiefs = [host.name for host in hosts if host.chief]
    if len(chiefs) != 1:
        problem = f"{', '.join(chiefs)} are" if chiefs else "none is"
        raise description.wrong(
            where,
            f"exactly one node must be the chief, but {problem}",
            "write chief: true for the host on which the program runs",
        )
    for host in hosts:
        if not host.chief and host.ssh is None:
            raise description.wrong(
                where,
                f"{host.name} is not the chief and has no ssh group",
                'write ssh_config: name, and describe it under "ssh"',
            )


def _ssh(facts: Any, where: str) -> description.Ssh:
    group = _mapping(facts, _SSH, where, "it")
    port = group.get("port", 22)
    if type(port) is not int or not 0 < port < 65536:
        raise description.wrong(
            where, f'"port" is {_quoted(port)}, which is not a port'
        )
    shared = group.get("shared_envs") or {}
    if not isinstance(shared, Mapping):
        raise description.wrong(where, '"shared_envs" is not a mapping')
    return description.Ssh(
        username=_text(group, "username", where),
        port=port,
        python_venv=_text(group, "python_venv", where),
        key_file=_text(group, "key_file", where),
        shared_envs=tuple(
            _variable(name, value, where) for name, value in shared.items()
        ),
    )


def _variable(name: Any, value: Any, where: str) -> tuple[str, str]:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise description.wrong(where, f"{_quoted(name)} is not the name of a variable")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise description.wrong(
            where, f"{name} in shared_envs is {_quoted(value)}", "put it in quotes"
        )
    return name, str(value)


def _indices(node: Mapping[str, Any], key: str, where: str) -> tuple[int, ...] | None:
    """Returns a field's device indices; None if the field is missing."""
    indices = node.get(key)
    if indices is None:
        return None
    valid = isinstance(indices, list) and all(
        type(k) is int and 0 <= k < _MOST_DEVICES for k in indices
    )
    if not valid or len({*indices}) < len(indices):
        raise description.wrong(
            where,
            f'"{key}" is not a list of distinct indices below {_MOST_DEVICES}',
            f"write {key}: [0, 1]",
        )
    return tuple(indices)


def _bandwidth(value: Any, where: str) -> float:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not 0 < value <= _FASTEST:
        raise description.wrong(
            where,
            f'"network_bandwidth" is {_quoted(value)}, which is not a number of Gbit/s',
        )
    return float(value)


def _mapping(
    facts: Any, keys: Sequence[str], where: str, subject: str
) -> Mapping[str, Any]:
    """Returns `facts`, checked to be a mapping with only known keys."""
    if not isinstance(facts, Mapping):
        raise description.wrong(
            where, f"{subject} is not a mapping of {', '.join(keys)}"
        )
    for key in facts:
        if key not in keys:
            raise description.wrong(
                where, f"{_quoted(key)} is unknown; expected {', '.join(keys)}"
            )
    return facts


def _text(group: Mapping[str, Any], key: str, where: str) -> str | None:
    value = group.get(key)
    if value is not None and not isinstance(value, str):
        raise description.wrong(
            where, f'"{key}" is {_quoted(value)}, which is not text', "put it in quotes"
        )
    return value


def _quoted(value: Any) -> str:
    """Returns a scalar as text; only the type of other values, which can be huge."""
    if value is None or isinstance(value, str | int | float):
        return errors.repr_of(value)
    return errors.type_of(value)
