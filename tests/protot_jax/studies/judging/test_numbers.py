"""Means of a model's texts."""

import pytest

from lm_jax.evaluate.generation import Bleu
from protot_jax.studies.judging import numbers, results


def test_means_of_few_texts_have_no_ends_beyond_their_scale():
    """Student's intervals of three such values would reach below 0 and above 1."""
    settings = results.Settings("s", 3, "0" * 64, 0, 9, {}, 0, 200, True)
    texts = ["a b c d " * 3, "a b c d e", "a b c d e f g h"]
    bleu = Bleu((0.0, 0.0, 0.06), (1.0, 1.0, 0.94), 0.2, "", "")
    found = numbers._measured(settings, "m", None, texts, bleu=bleu, rouge=(0.9, 0.1, 0.9))
    assert found.bleu.low == 0 < found.bleu.high < 1
    assert 0 < found.bleu_unsmoothed.low < found.bleu_unsmoothed.high == 1
    assert (found.rouge_l.low, found.rouge_l.high) == (0, 1)
    # 5 of 9 4-grams of the first text had occurred.
    assert found.repetition.estimate == pytest.approx(5 / 9 / 3) and found.repetition.low == 0
    # A number of words has no greatest value.
    assert found.words.low == 0 and found.words.high > 12
