# SPDX-License-Identifier: Apache-2.0
"""Interfaces of other libraries that work inside a step."""
