# SPDX-License-Identifier: Apache-2.0
"""Variables with a component per replica, or with one owner."""
