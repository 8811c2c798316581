# SPDX-License-Identifier: Apache-2.0
"""What other libraries find in a step."""
