"""Commands are tested on text made here."""

from tests.protot_jax.small_runs import text

__all__ = ["text"]
