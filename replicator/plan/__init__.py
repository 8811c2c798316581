"""What a step communicates, to look at before it runs: `Replicator.plan`.

Tables need rich and pictures need matplotlib; they are imported when one is asked for.
"""

from replicator.plan.rows import Plan, Row, Total, Totals

__all__ = ["Plan", "Row", "Total", "Totals"]
