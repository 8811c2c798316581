# SPDX-License-Identifier: Apache-2.0
"""A step: built by a list of passes, kept, and called."""
