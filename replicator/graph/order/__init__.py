# SPDX-License-Identifier: Apache-2.0
"""The effects of a step, and the order in which they happen."""
