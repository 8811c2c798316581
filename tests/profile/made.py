# SPDX-License-Identifier: Apache-2.0
"""Fake rows and measurements, for the tests of this folder."""

from __future__ import annotations

from replicator.graph.ir.placeholder import Value
from replicator.profile.parts import Measured
from replicator.report.rows import Row


def row(
    primitive: str = "all_reduce",
    shape: tuple[int | None, ...] = (1 << 20,),
    group: tuple[int, ...] = (0, 1),
    number: int = 0,
    algorithm: str = "hub",
) -> Row:
    """Returns a communication of float32 of this shape."""
    return Row(
        primitive=primitive,
        reduction="sum" if primitive == "all_reduce" else "",
        options={},
        group=group,
        operands=((Value("float32", shape),),) * len(group),
        links=(),
        algorithm=algorithm,
        path=(),
        times=1,
        lines=(f"train.py:{40 + number} in step_fn",),
        backward=False,
        scope=f"communicate/{primitive}/{number}",
    )


def measured(
    rows: tuple[Row, ...] = (),
    communication: tuple[float, ...] = (),
    replicas: int = 2,
    cores: int | None = 2,
    compute: float = 0.2,
    alone: float = 0.11,
    work: float = 0.2,
    fixed: float = 0.01,
    once: float = 0.0,
    busy: float = 1.0,
    spread: float = 0.0,
) -> Measured:
    """Returns a made-up measurement."""
    return Measured(
        devices=tuple(
            f"/job:localhost/replica:0/task:0/device:{'CPU' if cores else 'GPU'}:{r}"
            for r in range(replicas)
        ),
        cores=cores,
        step=fixed + compute + once + sum(communication),
        alone=alone,
        work=work,
        fixed=fixed,
        compute=compute,
        communication=communication,
        rows=rows,
        once=once,
        busy=busy,
        spread=spread,
    )
