# SPDX-License-Identifier: Apache-2.0
"""Drawings and checks for the code cells of pages."""
