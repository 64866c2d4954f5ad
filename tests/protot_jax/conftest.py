"""Commands are tested on text made here."""

from tests.protot_jax.small_runs import run, text

__all__ = ["run", "text"]
