# SPDX-License-Identifier: Apache-2.0
"""The processes that `benchmarks.hosts` runs on its hosts: network namespaces.

- `namespaces.py`: the hosts, and the link between them;
- `turns.py`: programs with a process on each host, which take turns;
- `in_graph.py`: Replicator and plain TensorFlow, in one program that uses all hosts;
- `between.py`: Replicator, with a program on each host;
- `wire.py`: plain sockets.

torch is in `benchmarks/peers/torch_hosts.py`. A new contender needs one command per
host: a process that calls `turns.answer`.
"""
