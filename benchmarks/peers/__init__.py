# SPDX-License-Identifier: Apache-2.0
"""torch and JAX on the same networks, each beside its own single device.

Run by `python -m benchmarks.peers` in an environment without TensorFlow, which `make
bench-peers` makes. Single devices of different frameworks differ in speed, so only the
cost of two replicas, relative to the framework's own device, is comparable.

- `torch_ddp.py`: DistributedDataParallel, gloo, a process per replica;
- `jax_devices.py`: pmap and shard_map, on host CPU devices;
- `ratios.py`: the table.
"""
