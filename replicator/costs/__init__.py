# SPDX-License-Identifier: Apache-2.0
"""What communication costs, and what is chosen for it."""
