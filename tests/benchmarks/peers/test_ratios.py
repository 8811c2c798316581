# SPDX-License-Identifier: Apache-2.0
"""The table of peers shows each beside its own single device."""

from benchmarks.peers import ratios
from tests.benchmarks.helpers import as_dict


def test_the_table_shows_ratios():
    torch = {"one device": as_dict(0.001, 0.001), "DDP": as_dict(0.002, 0.004)}
    jax = {name: as_dict(0.03) for name in ("one device", "pmap", "shard_map")}
    (table,) = ratios.tables({"torch": {"deep": torch}, "JAX": {"deep": jax}})
    assert table.rows == [
        ["deep, JAX", "pmap", "30.0", "30.0", "1.00", "0.0%"],
        ["deep, JAX", "shard_map", "30.0", "30.0", "1.00", "0.0%"],
        ["deep, torch", "DDP", "1.000", "3.000", "3.00", "0.0%"],
    ]
