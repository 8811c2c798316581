# SPDX-License-Identifier: Apache-2.0
"""Modules that only make the library faster; plain/ has the same names.

On import, each looks up the private TensorFlow names that it needs beyond the rest of
the library's, so that choice.py notices in time if one is gone.
"""
