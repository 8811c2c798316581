# SPDX-License-Identifier: Apache-2.0
"""The peers train the same networks as Replicator, without TensorFlow."""

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.peers import nets
from tests.benchmarks.helpers import run_code

OURS = {workload.name: workload for workload in workloads.WORKLOADS}


@pytest.mark.parametrize("workload", nets.WORKLOADS, ids=lambda w: w.name)
def test_batches_are_those_of_our_own_workloads(workload):
    ours = OURS[workload.name]
    assert workload.network == ours.network and workload.batch == ours.batch
    for part, own in zip(workload.parts(2), ours.parts(2), strict=True):
        for leaf, own_leaf in zip(part, own, strict=True):
            np.testing.assert_array_equal(leaf, own_leaf)


def test_nothing_of_the_peers_needs_tensorflow():
    code = (
        "import sys, benchmarks.peers.__main__; "
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras')))"
    )
    assert run_code(code).returncode == 0
