# SPDX-License-Identifier: Apache-2.0
"""What a graph contains: placeholders, facts about ops, captures."""
