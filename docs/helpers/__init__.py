# SPDX-License-Identifier: Apache-2.0
"""What code cells of pages draw and check with."""
