# SPDX-License-Identifier: Apache-2.0
"""Side-by-side programs: Replicator against what else there is.

`python -m benchmarks` runs those that measure, and writes RESULTS.md. The programs,
each a table:

- `steps.py`: the time of a training step, for six networks;
- `scaling.py`: the same over the number of replicas;
- `allreduce.py`: all-reduce alone, over sizes;
- `at_work.py`: all-reduce between other work;
- `build.py`: the time until a step's first result, over the number of replicas;
- `doors.py`: the same through AutoDist, in a session and as a function;
- `memory.py`: what variables and optimizer slots take;
- `xla.py`: what XLA makes of a step;
- `strategies.py`: steps under every strategy, and what they communicate;
- `embedding.py`: steps of a large embedding with Adam, in parts and whole;
- `fit.py`: an epoch of Keras' fit, for four networks;
- `profile.py`: steps as `python -m replicator.profile` predicts them, and as they are;
- `peers/`: torch and JAX, in an environment of their own;
- `hosts.py`: steps and all-reduce on two hosts, by `make bench-hosts`; `on_hosts/` has
  what runs there;
- `loops.py`: what communication in a loop costs;
- `anywhere.py`: what works where. It times nothing.

What they share:

- `networks.py`: what is trained, in numbers; also the peers use it, so it and all that
  it needs know nothing of TensorFlow;
- `workloads.py`: the same as Keras models, and the step that everyone takes;
- `contenders.py`: the ways of running that step;
- `timing.py`: how contenders are measured against one another on a noisy machine;
- `cli.py`: flags, and processes of their own;
- `results.py`, `tables.py`: JSON, Markdown and what is in the terminal;
- `targets.py`, `plots.py`, `report.py`: what RESULTS.md is made of.

Times are reported, never asserted: they say something about one machine on one day.
"""
