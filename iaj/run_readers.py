"""Readers of trained runs, registered for the commands that take a model of another library.

A reader imports its library when it reads a run, so that no command waits for it otherwise.
"""

from pathlib import Path

import jax

from lm_jax.weights.runs import RunReader, TrainedRun, is_run, register


def register_all() -> None:
    """Registers the readers of all libraries."""
    register("protot_jax", RunReader(is_run, _read_protot))


def _read_protot(folder: Path, mesh: jax.sharding.Mesh | None) -> TrainedRun:
    from protot_jax.training.saved_run import load_run, split_seed

    run, seed = split_seed(folder)
    return load_run(run, seed=seed, mesh=mesh)
