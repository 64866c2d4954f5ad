"""The clamp of the released code: what is forced, where it is felt, and PMR of the smaller."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers import edits
from protot_jax.studies.robustness import jensen_shannon, measure, numbers, pmr
from protot_jax.studies.robustness.results import RELEASED, ROWS, rows
from protot_jax.studies.robustness.sentences import Pair
from tests.protot_jax.studies.interventions import small_models

TEXT, OTHER = "the house of a river met", "its people who met in the town"
GATES = ("write", "read")
PAIRS = (
    Pair("a", TEXT, "the house of a town met"),
    Pair("a", OTHER, "its people of the river who met in the town"),
)


@pytest.fixture(scope="module")
def model():
    return small_models.drawn()


def unshared(model):
    """The same weights with a first layer that reads with its own gate."""
    return dataclasses.replace(model, mixer=dataclasses.replace(model.mixer, shared_routing=False))


def read(model, text, changes=None):
    """Logits `[T, V]` and the gates of all layers `[L, T, R]` by name."""
    output = lm_jax.forward(
        model.params,
        jnp.asarray([open_ids(model.tokenizer, text)]),
        model.cfg,
        mixer=model.mixer,
        edits=changes or {},
        record=dict.fromkeys(edits.GATES, lm_jax.keep),
    )
    return output.logits[0], output.records


def forced(model, gates, text, gate, *, source=-1, chosen=()):
    """The clamp at the last token of a text."""
    length = len(open_ids(model.tokenizer, text))
    return edits.released_clamp(
        gates,
        np.array([source]),
        np.arange(length)[None] == length - 1,
        gate=gate,
        shared_routing=model.mixer.shared_routing,
        heads=model.mixer.heads,
        chosen=chosen,
    )


def softmax(x, axis=-1):
    weights = np.exp(np.asarray(x, np.float64))
    return weights / weights.sum(axis, keepdims=True)


@pytest.mark.parametrize("gate", GATES)
def test_the_last_gate_of_the_last_layer_is_normalised_again_and_put_in_all_layers(model, gate):
    _, gates = read(model, OTHER)
    _, plain = read(model, TEXT)
    _, held = read(model, TEXT, forced(model, gates, TEXT, gate))
    wanted_R = softmax(gates[f"mixer.{gate}"][-1, 0, -1])
    site = f"mixer.{gate}"
    np.testing.assert_allclose(
        held[site][:, 0, -1], np.broadcast_to(wanted_R, (3, small_models.R)), rtol=1e-6
    )
    # It is flatter than a gate, and not the gate itself.
    assert wanted_R.max() / wanted_R.min() <= math.e
    assert np.abs(wanted_R - np.asarray(gates[site][-1, 0, -1])).max() > 0.01
    # Earlier tokens see nothing of it.
    for name in edits.GATES:
        np.testing.assert_allclose(held[name][:, 0, :-1], plain[name][:, 0, :-1], rtol=1e-5)


def test_a_forced_write_gate_is_read_in_a_first_layer_that_shares_its_routing(model):
    _, gates = read(model, OTHER)
    _, held = read(model, TEXT, forced(model, gates, TEXT, "write"))
    np.testing.assert_array_equal(held["mixer.read"][0, 0, -1], held["mixer.write"][0, 0, -1])
    # In later layers the read gate stays the model's own.
    later = np.abs(np.asarray(held["mixer.read"] - held["mixer.write"]))[1:, 0, -1].max(-1)
    assert (later > 1e-3).all()
    own = unshared(model)
    changes = forced(own, read(own, OTHER)[1], TEXT, "write")
    assert set(changes) == {"mixer.write"}


def test_a_forced_write_gate_reaches_the_last_logits_through_shared_routing_alone(model):
    def last_logits(one, gate, gates):
        """In one program for all forced gates, so that rounding is the same."""
        return read(one, TEXT, forced(one, gates, TEXT, gate))[0][-1]

    _, gates = read(model, OTHER)
    for one in (model, unshared(model)):
        for gate in GATES:
            run = jax.jit(functools.partial(last_logits, one, gate))
            # Any two gates will do: that of OTHER, and the same in another order.
            moved = jax.tree.map(lambda x: x[..., ::-1], gates)
            first, second = np.asarray(run(gates)), np.asarray(run(moved))
            if gate == "write" and not one.mixer.shared_routing:
                assert np.array_equal(first, second)
            else:
                assert np.abs(first - second).max() > 1e-4


def test_a_forced_read_gate_by_hand():
    """QUESTION reads CARRIER alone, with a gate of 1: forced, it has e / (e + 3) of it."""
    model = small_models.built()
    text = f"the {small_models.KEY} {small_models.QUESTION}"
    logits_TV, gates = read(model, text)
    one_hot_R = np.eye(small_models.R)[small_models.CARRIER]
    np.testing.assert_allclose(gates["mixer.read"][0, 0, -1], one_hot_R, atol=1e-6)
    held_TV, held = read(model, text, forced(model, gates, text, "read"))
    share = math.e / (math.e + 3)
    by_hand_R = np.where(one_hot_R, share, 1 / (math.e + 3))
    np.testing.assert_allclose(held["mixer.read"][0, 0, -1], by_hand_R, rtol=1e-5)
    # The final norm scales all logits alike; that of QUESTION comes from the residual stream.
    target, question = (
        small_models.one_id(model.tokenizer, word)
        for word in (small_models.TARGET, small_models.QUESTION)
    )
    was, now = (x_TV[-1, target] / x_TV[-1, question] for x_TV in (logits_TV, held_TV))
    assert float(was) > 0.1
    assert float(now / was) == pytest.approx(share, rel=1e-4)


def test_heads_are_normalised_apart_and_only_chosen_prototypes_are_forced(model):
    gates_LBSR = jnp.asarray([[[[0.9, 0.1, 0.5, 0.5]]], [[[0.2, 0.8, 1.0, 0.0]]]])
    gates = dict.fromkeys(edits.GATES, gates_LBSR)
    (edit,) = edits.released_clamp(
        gates, [0], [[True]], gate="read", shared_routing=True, heads=2, chosen=((1, 2),)
    ).values()
    wanted = np.concatenate([softmax([0.2, 0.8]), softmax([1.0, 0.0])])
    np.testing.assert_allclose(edit.value, np.broadcast_to(wanted, (2, 1, 1, 4)), rtol=1e-6)
    assert np.argwhere(edit.mask).tolist() == [[1, 0, 0, 2]]


@pytest.mark.parametrize("shared", [True, False])
def test_columns_are_those_of_one_sentence_at_a_time(model, shared):
    model = model if shared else unshared(model)
    encoded = measure.encode(model, PAIRS, seed=0)
    columns = measure.measure(model, encoded, shape=(3, 16), released=True)
    plain = measure.measure(model, encoded, shape=(3, 16))
    assert set(columns) - set(plain) == set(RELEASED)
    assert all(
        np.array_equal(np.asarray(columns[name]), np.asarray(plain[name]), equal_nan=True)
        for name in plain
    )
    for i, pair in enumerate(PAIRS):
        x_TV, gates = read(model, pair.text)
        for name, gate in RELEASED.items():
            held_TV, _ = read(model, pair.perturbed, forced(model, gates, pair.perturbed, gate))
            wanted = float(jensen_shannon(x_TV[-1], held_TV[-1]))
            assert columns[name][i] == pytest.approx(wanted, rel=1e-3, abs=1e-8)
        # As in `test_measure`: rounding of logits by 1e-4, and JS by its square root times that.
        base = columns["js"][i]
        near = 1e-4 * math.sqrt(base) + 1e-8
        assert (abs(columns["js_released_write"][i] - base) < near) != shared
        assert abs(columns["js_released_read"][i] - base) > near


def test_a_model_without_prototypes_has_empty_columns():
    llama = small_models.attention()
    encoded = measure.encode(llama, PAIRS, seed=0)
    found = measure.measure(llama, encoded, shape=(2, 16), released=True)
    assert all(math.isnan(value) for name in RELEASED for value in found[name])


def test_mediation_is_of_the_smaller_divergence_of_each_pair():
    js = np.array([0.4, 0.2, 0.1])
    nothing = np.full(3, np.nan)
    columns = dict.fromkeys(ROWS.names, nothing) | {
        "text": np.array(["a", "b", "c"]),
        "js": js,
        "js_clamped": js,
        "same_top": np.array([True, False, True]),
        "same_tokens": np.array([False, False, False]),
        "js_released_write": np.array([0.1, 0.3, 0.2]),
        "js_released_read": np.array([0.3, 0.2, 0.4]),
    }
    found = numbers.measured(columns, seed=0).clamp.released
    assert found.write_js.mean == pytest.approx(0.2)
    assert found.read_js.mean == pytest.approx(0.3)
    # 0.1, 0.2 and 0.2: ratios 3/4, 0 and -1.
    assert found.js.mean == pytest.approx(0.5 / 3)
    assert found.pmr.mean_of_ratios == pytest.approx(-1 / 12)
    assert found.pmr.ratio_of_means.mean == pytest.approx(1 - 0.5 / 0.7)
    assert found.pmr.median == 0 and found.pmr.positive == pytest.approx(1 / 3)
    assert found.pmr.mean_of_ratios == pmr(js, [0.1, 0.2, 0.2]).mean_of_ratios
    without = {name: values for name, values in columns.items() if name not in RELEASED}
    assert numbers.measured(without, seed=0).clamp.released is None


def test_the_columns_of_a_default_run_are_as_before():
    assert rows(released=False).equals(ROWS)
    assert rows(released=True).names == [*ROWS.names, *RELEASED]
