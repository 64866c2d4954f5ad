"""Tests of many small programs, and a pretraining run on text made here."""

from collections.abc import Iterator

import jax
import pytest

from tests.compilation import quickly_compiled
from tests.protot_jax.small_runs import text

__all__ = ["quickly_compiled", "text"]


@pytest.fixture(scope="module", autouse=True)
def fixtures_quickly_compiled() -> Iterator[None]:
    """What the fixtures of a module compile, before `quickly_compiled` of its first test."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
