# SPDX-License-Identifier: Apache-2.0
"""Replaces what was matched by ops that communicate."""
