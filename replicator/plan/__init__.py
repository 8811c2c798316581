# SPDX-License-Identifier: Apache-2.0
"""What a step communicates, to look at before it runs: `Replicator.plan`.

Tables need rich and pictures need matplotlib; they are imported when one is asked for.
"""

from replicator.plan.plan import Plan
from replicator.plan.rows import Row, Total, Totals

__all__ = ["Plan", "Row", "Total", "Totals"]
