"""Fixtures of pretraining runs on synthetic text."""

from tests.protot_jax.small_runs import run, text

__all__ = ["run", "text"]
