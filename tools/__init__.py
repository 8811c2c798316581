# SPDX-License-Identifier: Apache-2.0
"""What the Makefile runs: wheels, versions of Python and TensorFlow, GPUs, checks."""
