"""Clears the compiled comparisons of a file after its tests."""

from collections.abc import Generator

import pytest

from tests.kernels import comparison


@pytest.fixture(autouse=True, scope="module")
def compared_programs_end_with_their_module() -> Generator[None]:
    """No file calls the programs of another; see the fixture of `tests/conftest.py`."""
    yield
    comparison.forget()
