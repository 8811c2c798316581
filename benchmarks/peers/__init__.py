# SPDX-License-Identifier: Apache-2.0
"""torch and JAX on the same networks, each beside its own single device.

Run by `python -m benchmarks.peers` in an environment without TensorFlow, which
`make bench-peers` makes. A framework's single device may be faster or slower than
another's; what is compared across frameworks is only what two replicas cost each.

- `torch_ddp.py`: DistributedDataParallel, gloo, a process per replica;
- `jax_devices.py`: pmap and shard_map, on host CPU devices;
- `ratios.py`: the table.
"""
