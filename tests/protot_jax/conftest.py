"""Mixers are tested by many small programs, and commands on text made here."""

from tests.compilation import quickly_compiled
from tests.protot_jax.small_runs import text

__all__ = ["quickly_compiled", "text"]
