"""BLEU by its formula, ROUGE-L by all subsequences, distinct n-grams and repetition by counting."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
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
    with pytest.raises(UsageError, match="rouge_l: 0 texts and 0 references"):
        generation.rouge_l([], [])


WORDS = st.lists(st.sampled_from("abc"), max_size=7).map(" ".join)


def test_rouge_l_by_hand():
    """Of 6 words and 14, "the war to end" are common in this order, and "peace" is not."""
    (found,) = generation.rouge_l(["the war peace to end mexico"], [REFERENCE])
    assert found == pytest.approx(2 * 4 / (6 + 14))
    # P = 3/4 and R = 3/5, so that F = 2 P R / (P + R).
    (found,) = generation.rouge_l(["a b x c"], ["a y b z c"])
    assert found == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))


def test_rouge_l_reads_runs_of_letters_and_digits_in_lower_case():
    texts, references = (
        ["It’s 1846—WAR!", "snake_case", "Å b"],
        ["it s 1846 war", "snake case", "å"],
    )
    assert generation.rouge_l(texts, references) == pytest.approx((1.0, 1.0, 2 / 3))


def test_rouge_l_of_a_text_without_words_is_0():
    assert generation.rouge_l(["", "...", "a"], ["a", "...", ""]) == (0.0, 0.0, 0.0)


@given(WORDS, WORDS)
def test_rouge_l_is_that_of_the_longest_of_all_subsequences(text, reference):
    def subsequences(words):
        return {kept for n in range(len(words) + 1) for kept in itertools.combinations(words, n)}

    first, second = text.split(), reference.split()
    longest = max(map(len, subsequences(first) & subsequences(second)))
    wanted = 2 * longest / (len(first) + len(second)) if first or second else 0.0
    (found,) = generation.rouge_l([text], [reference])
    assert found == wanted and generation.rouge_l([reference], [text]) == (found,)


@given(WORDS.filter(bool))
def test_rouge_l_is_1_for_equal_texts_and_0_without_a_common_word(text):
    assert generation.rouge_l([text, text], [text, "d e f"]) == (1.0, 0.0)


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
