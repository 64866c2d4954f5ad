"""Features split over eight devices: loss and gradient of one, with one sum of decoded parts."""

import json
import math
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from tests.sparse_jax.transcoders import eight_devices

ROOT = Path(__file__).parents[3]
EIGHT = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.fixture(scope="module")
def result():
    """What the module prints; it fails where loss or gradient are out of their bounds."""
    done = subprocess.run(
        [sys.executable, "-m", eight_devices.__name__],
        cwd=ROOT,
        env=EIGHT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.splitlines()[-1])


def arrays(shape):
    """The numbers of entries of the arrays of an HLO shape."""
    return [
        math.prod(map(int, filter(None, dims.split(","))))
        for dims in re.findall(r"[a-z]\w*\[([\d,]*)\]", shape)
    ]


def test_eight_devices_give_the_loss_and_gradient_of_one(result):
    assert result["devices"] == 8
    assert len(result["collectives"]) == 2 * len(eight_devices.MESHES)


def test_quantiles_of_features_are_taken_where_the_features_are(result):
    """No array of the program is larger than the activations, which every device reads whole."""
    largest = max(size for shape in result["quantiles"] for size in arrays(shape))
    assert largest == eight_devices.L * eight_devices.X * eight_devices.D


@pytest.mark.parametrize("kind", ["jumprelu", "batchtopk"])
def test_decoded_parts_are_summed_once_and_no_weight_or_feature_is_gathered(result, kind):
    found = result["collectives"][f"{kind} (1, 1, 8)"]
    sizes = sorted(size for _, shape in found for size in arrays(shape))
    whole = eight_devices.L * eight_devices.X * eight_devices.D
    # One for the reconstruction, one for what AuxK lets dead features write; the rest are counts
    # and sums of losses.
    assert sizes[-2:] == [whole, whole] and set(sizes[:-2]) <= {1}
    assert {name for name, _ in found} == {"all-reduce"}
