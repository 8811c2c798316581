# SPDX-License-Identifier: Apache-2.0
"""Does by the public API, more slowly, what the modules of fast/ do."""
