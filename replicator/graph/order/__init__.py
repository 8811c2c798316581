# SPDX-License-Identifier: Apache-2.0
"""Effects, and in which order they happen."""
