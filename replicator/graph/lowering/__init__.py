# SPDX-License-Identifier: Apache-2.0
"""Replaces matched placeholders by ops that communicate."""
