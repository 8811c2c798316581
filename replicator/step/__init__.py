# SPDX-License-Identifier: Apache-2.0
"""Steps: built by a list of passes, cached, and called."""
