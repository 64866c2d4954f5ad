"""Alignment, holding of gates, and every column of a batch against one sentence at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import StoppedError
from lm_jax.run import processes
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers import edits
from protot_jax.studies.robustness import align, arithmetic_geometric, jensen_shannon, measure
from protot_jax.studies.robustness.sentences import Pair
from tests.protot_jax.studies.interventions import small_models

# Of the words of the tokenizer: one word exchanged, one added, one removed, nothing changed.
PAIRS = (
    Pair("a", "the house of a river met the people", "the house of a town met the people"),
    Pair("a", "the people who met in town", "the people of the river who met in town"),
    Pair("a", "its river and its house met its people", "river and its house met its people"),
    Pair("a", "the house and the river", "the house and the river"),
)


@pytest.fixture(scope="module")
def model():
    return small_models.drawn()


@pytest.fixture(scope="module")
def columns(model):
    return measured(model, PAIRS)


def measured(model, pairs):
    """As the command does: padded to more rows and tokens than there are."""
    return measure.measure(model, measure.encode(model, pairs, seed=0), shape=(8, 16))


def logits(model, text, changes=None, record=()):
    tokens_1T = jnp.asarray([open_ids(model.tokenizer, text)])
    output = lm_jax.forward(
        model.params,
        tokens_1T,
        model.cfg,
        mixer=model.mixer,
        edits=changes or {},
        record=dict.fromkeys(record, lm_jax.keep),
    )
    return output.logits[0], output.records


def test_alignment_of_known_changes():
    # Exchanged: held token by token, compared after it only.
    found = align([1, 2, 3, 4, 5], [1, 2, 9, 4, 5])
    assert found.held_T.tolist() == [0, 1, 2, 3, 4]
    assert found.compared_T.tolist() == [-1, -1, -1, 3, 4]
    # One token becomes two: the span is aligned to nothing.
    found = align([1, 2, 3, 4], [1, 8, 9, 3, 4])
    assert found.held_T.tolist() == [0, -1, -1, 2, 3]
    assert found.compared_T.tolist() == [-1, -1, -1, 2, 3]
    # Removed and added.
    assert align([1, 2, 3], [1, 3]).compared_T.tolist() == [-1, 2]
    assert align([1, 3], [1, 2, 3]).held_T.tolist() == [0, -1, 1]
    assert align([1, 2], [1, 2]).compared_T.tolist() == [-1, -1]


def test_columns_are_those_of_one_sentence_at_a_time(model, columns):
    for i, pair in enumerate(PAIRS):
        (x_TV, gates), (y_TV, _) = (
            logits(model, text, record=edits.GATES) for text in (pair.text, pair.perturbed)
        )
        ids = [open_ids(model.tokenizer, text) for text in (pair.text, pair.perturbed)]
        found = align(*ids)
        assert columns["tokens"][i] == len(ids[0])
        assert columns["perturbed_tokens"][i] == len(ids[1])
        assert columns["same_tokens"][i] == (ids[0] == ids[1])
        # Padding and batching change the order of sums: logits by 1e-4 here, JS by its square root
        # times that.
        base = float(jensen_shannon(x_TV[-1], y_TV[-1]))
        near = 1e-4 * math.sqrt(base) + 1e-8
        assert columns["js"][i] == pytest.approx(base, abs=near)
        assert columns["ag"][i] == pytest.approx(
            float(arithmetic_geometric(x_TV[-1], y_TV[-1])), rel=1e-3, abs=1e-8
        )
        at = np.nonzero(found.compared_T >= 0)[0]
        if at.size:
            aligned = jensen_shannon(x_TV[found.compared_T[at]], y_TV[at]).mean()
            assert columns["js_aligned"][i] == pytest.approx(float(aligned), rel=1e-3)
        else:
            assert math.isnan(columns["js_aligned"][i])
        held_TV, _ = logits(model, pair.perturbed, edits.clamp(gates, found.held_T[None]))
        clamped = float(jensen_shannon(x_TV[-1], held_TV[-1]))
        assert columns["js_clamped"][i] == pytest.approx(clamped, rel=1e-3, abs=1e-8)
    assert all(columns["js"][i] > 1e-6 for i in range(3))


def test_holding_all_gates_of_an_unchanged_text_changes_nothing(columns):
    assert columns["js"][3] == 0 and columns["js_clamped"][3] < 1e-10
    assert math.isnan(columns["js_aligned"][3])
    # Another sentence's gates do change it.
    assert columns["js_control"][3] > 1e-6


def test_held_gates_are_those_of_the_other_text_and_no_others(model):
    source_1T = np.array([[0, 1, -1, 3, 2, -1]])
    text, other = "the house of a river", "the people who met in town"
    _, gates = logits(model, other, record=edits.GATES)
    _, plain = logits(model, text, record=edits.GATES)
    length = plain[edits.GATES[0]].shape[2]
    source_1T = source_1T[:, :length]
    for chosen in ((), ((1, 2), (2, 0))):
        _, held = logits(model, text, edits.clamp(gates, source_1T, chosen), record=edits.GATES)
        for site in edits.GATES:
            kept, wanted = np.asarray(held[site][:, 0]), np.asarray(gates[site][:, 0])
            for t, s in enumerate(source_1T[0]):
                if s < 0:
                    continue
                if not chosen:
                    assert np.array_equal(kept[:, t], wanted[:, s])
                for layer, prototype in chosen:
                    assert kept[layer, t, prototype] == wanted[layer, s, prototype]
            # Layer 0 reads the same tokens, and its other gates are its own.
            own = np.asarray(plain[site][0, 0])
            free = source_1T[0] < 0
            np.testing.assert_allclose(kept[0][free], own[free], rtol=1e-6)
            if chosen:
                np.testing.assert_allclose(kept[0], own, rtol=1e-6)


def test_the_control_is_another_text_that_is_long_enough(model):
    encoded = measure.encode(model, PAIRS, seed=0)
    ids = {tuple(open_ids(model.tokenizer, pair.text)) for pair in PAIRS}
    for each in encoded:
        if each.control is not None:
            assert tuple(each.control) in ids and each.control != each.original
            assert len(each.control) >= len(each.original)
    # The longest two are of one length, and control each other.
    assert encoded[0].control == encoded[2].original and encoded[2].control == encoded[0].original
    assert measure.encode(model, PAIRS[:1], seed=0)[0].control is None


def test_without_a_control_its_columns_are_empty(model):
    alone = measured(model, PAIRS[:1])
    assert math.isnan(alone["js_control"][0]) and alone["js_clamped"][0] > 0


def test_a_model_without_prototypes_has_no_held_columns():
    found = measured(small_models.attention(), PAIRS)
    assert all(math.isnan(value) for value in found["js_clamped"] + found["js_control"])
    assert found["js"][0] > 0 and found["js"][3] == 0


def test_a_stop_ends_a_batch_before_its_next_run_of_the_model(model, monkeypatch):
    looks = []

    def look(where):
        looks.append(where)
        if len(looks) == 2:
            raise StoppedError(where)

    monkeypatch.setattr(processes, "check_stop", look)
    with pytest.raises(StoppedError, match="between two runs of the model"):
        measured(model, PAIRS)
