# SPDX-License-Identifier: Apache-2.0
"""The strategy builders, one per file."""
