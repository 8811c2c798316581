# SPDX-License-Identifier: Apache-2.0
"""The primitives: one file each, with its meaning, its dual and its lowering."""
