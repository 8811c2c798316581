# SPDX-License-Identifier: Apache-2.0
"""Sphinx extensions of the documentation site, one file per purpose."""
