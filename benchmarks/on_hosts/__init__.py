# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.hosts` runs on several hosts, which are network namespaces.

- `namespaces.py`: the hosts, and the link between them;
- `turns.py`: programs with a process on each host, which take turns;
- `in_graph.py`: Replicator and plain TensorFlow, in one program that uses all hosts;
- `wire.py`: plain sockets.

torch is in `benchmarks/peers/torch_hosts.py`. Another contender is one more command per
host: a process that calls `turns.answer`.
"""
