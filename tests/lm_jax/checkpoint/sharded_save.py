"""Saves an array split over two processes, and prints by how many bytes their memory grew.

python -m tests.lm_jax.checkpoint.sharded_save COORDINATOR PROCESS FOLDER
"""

from pathlib import Path
import re
import sys

import jax
import numpy as np

from lm_jax.checkpoint.folder import save_checkpoint
from lm_jax.parallel import sharding
from lm_jax.run import processes

WHOLE = 2**28


def kilobytes(name):
    return int(re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def growth(action):
    """Bytes by which the peak of resident memory in `action` is above what was held before."""
    # Sets the peak to what is held now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    action()
    return 1024 * (kilobytes("VmHWM") - before)


def split(mesh, size):
    """Numbers drawn by each process for its half."""
    rng = np.random.default_rng(jax.process_index())
    place = sharding.batch_sharding(mesh)
    half = rng.standard_normal(size // 8, np.float32)
    return jax.make_array_from_process_local_data(place, half, (size // 4,))


def main():
    coordinator, index, folder = sys.argv[1:]
    processes.join(coordinator, 2, int(index))
    mesh = sharding.make_mesh(fsdp=2)
    # What the first save loads and starts is no part of the measured one.
    save_checkpoint(Path(folder) / "first", {"w": split(mesh, 2**12)})
    params = {"w": split(mesh, WHOLE)}
    saving = growth(lambda: save_checkpoint(Path(folder) / "second", params))
    gathering = growth(lambda: sharding.fetch(params))
    print(saving, gathering)


if __name__ == "__main__":
    main()
