"""Models on disk with transcoders, for the tests of the command."""

import pytest

from sparse_jax.graphs import supernodes
from tests.sparse_jax.graphs.small_command import save_all


@pytest.fixture(scope="module")
def few_are_alike():
    """Supernodes of these random models, whose features are less alike than trained ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(supernodes.propose.__kwdefaults__, "similarity", 0.2)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("models"))
