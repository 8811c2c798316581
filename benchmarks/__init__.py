# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of Replicator against the alternatives.

`python -m benchmarks` runs the programs that measure and writes RESULTS.md. The
programs, each of which prints a table:

- `steps.py`: the time of a training step, for six networks;
- `scaling.py`: the same over the number of replicas;
- `allreduce.py`: all-reduce alone, over sizes;
- `at_work.py`: all-reduce between other work;
- `build.py`: the time until a step's first result, over the number of replicas;
- `doors.py`: the same through AutoDist, in a session and as a function;
- `memory.py`: the memory of variables and optimizer slots;
- `xla.py`: a step compiled by XLA;
- `strategies.py`: the step time and traffic of every strategy;
- `embedding.py`: steps of a large embedding with Adam, split and whole;
- `fit.py`: an epoch of Keras' fit, for four networks;
- `profile.py`: step times, measured and as `python -m replicator.profile` predicts;
- `peers/`: torch and JAX, in a separate environment;
- `hosts.py`: steps and all-reduce on two hosts, by `make bench-hosts`; its processes
  are in `on_hosts/`;
- `loops.py`: the cost of communication in a loop;
- `anywhere.py`: which primitives work at which places of a graph. It times nothing.

Shared modules:

- `networks.py`: networks as numbers; the peers use it too, so neither it nor its
  imports know of TensorFlow;
- `workloads.py`: the same networks as Keras models, and the common training step;
- `contenders.py`: the ways of running that step;
- `timing.py`: compares contenders on a noisy machine;
- `cli.py`: flags and subprocesses;
- `results.py`, `tables.py`: JSON, Markdown and terminal output;
- `targets.py`, `plots.py`, `report.py`: the contents of RESULTS.md.

Times are reported, never asserted: they describe one machine on one day.
"""
