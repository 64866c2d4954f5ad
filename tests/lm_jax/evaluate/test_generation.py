"""BLEU by its formula, distinct n-grams and repetition by counting."""

import math

import pytest

from lm_jax.errors import UsageError
from lm_jax.evaluate import generation

REFERENCE = "the war with mexico was brought to an end by a treaty of peace"


def test_bleu_of_a_sentence_is_its_formula():
    """Precisions 7/7, 4/6, 3/5, 2/4 and a brevity penalty of exp(1 - 14 / 7)."""
    text = "the war with mexico was to end"
    found = generation.bleu([text], [REFERENCE])
    precisions = [1, 4 / 6, 3 / 5, 2 / 4]
    wanted = math.exp(1 - 14 / 7) * math.prod(precisions) ** 0.25
    assert found.unsmoothed[0] == pytest.approx(wanted, rel=1e-9)
    assert found.sentences[0] == pytest.approx(wanted, rel=1e-9)
    assert found.corpus == pytest.approx(wanted, rel=1e-9)


def test_only_smoothed_bleu_sees_a_text_without_a_common_4_gram():
    found = generation.bleu(["the war was of a treaty"], [REFERENCE])
    assert found.unsmoothed == (0.0,) and 0 < found.sentences[0] < 1
    assert "smooth:exp" in found.signature and "eff:yes" in found.signature
    assert "smooth:none" in found.unsmoothed_signature and "version:" in found.signature


def test_the_reference_itself_has_all_and_a_short_text_loses_no_order():
    found = generation.bleu([REFERENCE, "a treaty"], [REFERENCE, "a treaty"])
    assert found.sentences == pytest.approx((1.0, 1.0)) and found.corpus == pytest.approx(1.0)
    assert found.unsmoothed == pytest.approx((1.0, 0.0))


def test_texts_and_references_must_pair():
    with pytest.raises(UsageError, match="2 texts and 1 references"):
        generation.bleu(["a", "b"], ["a"])


def test_distinct_counts_over_all_texts():
    texts = ["a b a b", "a b c"]
    # 7 words of 3 kinds; 5 pairs: a b, b a, a b, a b, b c.
    assert generation.distinct(texts, 1) == 3 / 7
    assert generation.distinct(texts, 2) == 3 / 5
    assert math.isnan(generation.distinct(["a b"], 3))


def test_a_loop_repeats_itself_and_a_list_of_words_does_not():
    loop = "a b c d " * 5
    # 17 4-grams, of which 4 differ.
    assert generation.repetition(loop) == 1 - 4 / 17
    assert generation.repetition("a b c d e f") == 0
    assert math.isnan(generation.repetition("a b c"))
