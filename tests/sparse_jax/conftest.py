"""A corpus of few words and a tiny model over it, made once."""

import pytest

from tests.sparse_jax.small_runs import made_base, made_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return made_text(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return made_base(tmp_path_factory.mktemp("base") / "model")
