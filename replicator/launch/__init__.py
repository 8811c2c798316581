# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.launch`: starts servers and programs on hosts.

Nothing here imports TensorFlow; only the processes that it starts do.
"""
