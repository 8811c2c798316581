# SPDX-License-Identifier: Apache-2.0
"""Steps: built by passes, cached, and called."""
