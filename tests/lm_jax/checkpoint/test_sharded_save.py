"""No process of a run holds the whole of what they save together."""

import os
import subprocess
import sys

import portpicker
import pytest

from tests.lm_jax.checkpoint import sharded_save
from tests.lm_jax.weights.parity_pairs import ROOT, end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc"),
]


def test_each_of_two_processes_saves_its_half_and_gathers_nothing(tmp_path):
    """Its memory grows by a copy of its half, and not by the other; in its files is its half."""
    address = f"127.0.0.1:{portpicker.pick_unused_port()}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    pair = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.lm_jax.checkpoint.sharded_save"),
                *(address, str(index), tmp_path),
            ],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    codes, outs, errs = end(pair, limit=600)
    assert codes == [0, 0], errs
    half = sharded_save.WHOLE // 2
    for out in outs:
        saving, gathering = map(int, out.split()[-2:])
        assert saving < 1.5 * half < gathering
    arrays = tmp_path / "second" / "arrays"
    for index in range(2):
        own = [file for file in arrays.rglob(f"*.process_{index}/**/*") if file.is_file()]
        # Random numbers hardly compress.
        assert 0.75 * half < sum(file.stat().st_size for file in own) < 1.25 * half
