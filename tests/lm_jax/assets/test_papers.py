"""The papers' numbers are read strictly, and only the tables that are asked for."""

import dataclasses

import pytest

from lm_jax.assets import papers
from lm_jax.run.results import InvalidError


@dataclasses.dataclass(frozen=True)
class Perplexity:
    test_perplexity: float


@dataclasses.dataclass(frozen=True)
class Numbers:
    table_1: dict[str, Perplexity]


@dataclasses.dataclass(frozen=True)
class Misread:
    table_13: dict[str, Perplexity]


def test_a_table_is_read_into_its_dataclass():
    assert papers.numbers("protot", Numbers).table_1["protot"] == Perplexity(90.5)
    assert papers.tables("protot").keys() >= {"table_1", "table_13", "claim"}


def test_an_entry_that_no_field_has_is_refused():
    with pytest.raises(InvalidError, match="steps_per_second is not a field of Perplexity"):
        papers.numbers("protot", Misread)
