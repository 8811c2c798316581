# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.launch`: starts servers and a program.

Nothing here needs TensorFlow: what runs on it are other processes.
"""
