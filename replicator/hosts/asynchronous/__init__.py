# SPDX-License-Identifier: Apache-2.0
"""Asynchronous mode: programs that train the same variables, each at its own speed."""
