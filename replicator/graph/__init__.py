# SPDX-License-Identifier: Apache-2.0
"""The compiler: pure graph-to-graph passes. WORKSPACE.md gives their order."""
