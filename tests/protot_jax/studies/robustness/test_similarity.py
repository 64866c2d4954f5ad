"""The sentence encoder on its real weights."""

import numpy as np
import pytest

from protot_jax.studies.robustness.similarity import Encoder, similarities


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.mark.real("minilm")
def test_cosines_are_those_that_sentence_transformers_documents(encoder):
    """The example of the library's page "SentenceTransformer: usage", to its four digits."""
    vectors_ND = encoder(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    wanted = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors_ND @ vectors_ND.T, wanted, atol=6e-5)


@pytest.mark.real("minilm")
def test_a_vector_depends_on_no_other_sentence_of_its_batch(encoder):
    texts = ["I like this color.", "word " * 300, *(f"number {i} of many" for i in range(40))]
    together = encoder(texts)
    for i in (0, 1, 41):
        np.testing.assert_allclose(encoder([texts[i]])[0], together[i], atol=1e-5)
    found = similarities(encoder, [("I like this color.", "I like this colour."), ("a", "a")])
    assert 0.9 < found[0] < 1 and found[1] == pytest.approx(1, abs=1e-6)
