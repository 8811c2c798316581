# SPDX-License-Identifier: Apache-2.0
"""Programs of the Makefile: wheels, Python and TensorFlow versions, GPUs, checks."""
