# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.serve`: the server of one host."""
