"""One run that the tests of concept reports share, and another of a model without prototypes."""

import pytest

from tests.protot_jax.small_runs import save_untrained, settings


@pytest.fixture(scope="session")
def run(text, tmp_path_factory):
    """A run of two seeds with 2 layers of 4 prototypes."""
    config = settings(text, dtype="float32", seeds=(1, 2))
    config.prototypes.num_prototypes = 4
    return save_untrained(config, tmp_path_factory.mktemp("concepts") / "run")


@pytest.fixture(scope="session")
def attention_run(text, tmp_path_factory):
    """A run of a model that has no prototypes."""
    config = settings(text, model="llama", seeds=(1,))
    return save_untrained(config, tmp_path_factory.mktemp("attention") / "run")
