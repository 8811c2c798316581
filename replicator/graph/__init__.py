# SPDX-License-Identifier: Apache-2.0
"""The compiler: pure passes from graph to graph. See WORKSPACE.md for the order."""
