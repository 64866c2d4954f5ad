"""A corpus of few words and a tiny model with its tokenizer, shared by all tests."""

import pytest

from tests.sparse_jax.small_runs import save_base, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "model")
