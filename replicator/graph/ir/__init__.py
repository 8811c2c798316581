# SPDX-License-Identifier: Apache-2.0
"""What a graph holds: placeholders, facts about ops, captures."""
