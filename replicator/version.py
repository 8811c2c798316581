# SPDX-License-Identifier: Apache-2.0
"""The version of the library, defined only here; setup.cfg reads it."""

__version__ = "0.1.0"
