"""Readers of trained runs, registered for the commands that take a model of another library.

A reader imports its library when it reads a run, so that no command waits for it otherwise.
"""

from pathlib import Path
import re

import jax

from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.weights.runs import RunReader, TrainedRun, register

_SEED = re.compile(r"seed_(\d+)")


def register_all() -> None:
    """Registers the readers of all libraries."""
    register("protot_jax", RunReader(_is_protot, _read_protot))


def _is_protot(folder: Path) -> bool:
    """Whether it is a run of `iaj protot pretrain`, one of its seeds' folders, or an export."""
    if (folder / "export.json").is_file():
        return (folder / CONFIG_FILE).is_file()
    run = folder.parent if _SEED.fullmatch(folder.name) else folder
    return (run / CONFIG_FILE).is_file() and any(
        (each / "checkpoints").is_dir() and _SEED.fullmatch(each.name)
        for each in run.glob("seed_*")
    )


def _read_protot(folder: Path, mesh: jax.sharding.Mesh | None) -> TrainedRun:
    from protot_jax.saved_run import load_run, split_seed

    run, seed = split_seed(folder)
    return load_run(run, seed=seed, mesh=mesh)
