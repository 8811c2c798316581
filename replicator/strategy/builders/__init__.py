# SPDX-License-Identifier: Apache-2.0
"""The builders of strategies, one file each."""
