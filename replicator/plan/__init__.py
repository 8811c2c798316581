# SPDX-License-Identifier: Apache-2.0
"""What a step communicates, known before it runs: `Replicator.plan`.

Tables need rich and pictures need matplotlib, which are imported on first use.
"""

from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.record import Link, Wire
from replicator.report.plan import Plan
from replicator.report.rows import Row, Total, Totals

__all__ = ["Link", "Plan", "Row", "Total", "Totals", "Value", "Wire"]
