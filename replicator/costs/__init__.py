# SPDX-License-Identifier: Apache-2.0
"""Models the cost of communication, and chooses by it."""
