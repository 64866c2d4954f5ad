"""Paths of transcoders made by hand, of which every share is known, and of a trained one."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.model.precision import PRECISION
from lm_jax.study import Work
from sparse_jax.studies.two_hop import report
from sparse_jax.studies.two_hop.numbers import paths
from sparse_jax.studies.two_hop.results import TwoHopSummary
from sparse_jax.studies.two_hop.run import measure, plan, trained
from sparse_jax.studies.two_hop.settings import TwoHopConfig, smoke
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from sparse_jax.transcoders.two_hop_model import TwoHopModel

P = 0.6
RELAY = TwoHopModel(1, "relay")
AND = TwoHopModel(1, "and")


@pytest.mark.parametrize(("model", "result"), [(RELAY, lambda a, b: (a, b)), (AND, min)])
def test_the_model_computes_its_functions_of_every_input(model, result):
    bits_XB = model.every_input()
    assert {tuple(row) for row in bits_XB} == set(itertools.product((0, 1), repeat=4))
    acts = model.activations(jnp.asarray(bits_XB))
    for bits, x, y in zip(
        bits_XB, acts.input_LXD.swapaxes(0, 1), acts.output_LXD.swapaxes(0, 1), strict=True
    ):
        h = [int(bits[0] and bits[1]), int(bits[2] and bits[3])]
        o = np.atleast_1d(result(*h)).tolist()
        silent = [0] * len(o)
        assert x[0].tolist() == [*bits, 0, 0, *silent]
        assert y[0].tolist() == [0] * 4 + h + silent
        assert x[1].tolist() == [*bits, *h, *silent]
        assert y[1].tolist() == [0] * 6 + o


def _by_hand(route: str) -> Transcoder:
    """Of the relay, exact: results from the first layer, from bits, or from ANDs of pairs."""
    D, F = RELAY.hidden_size, 2
    encoder_LFD, bias_LF = np.zeros((2, F, D)), np.zeros((2, F))
    own_FD, first_FD, second_FD = (np.zeros((F, D)) for _ in range(3))
    for i in range(2):
        encoder_LFD[0, i, [2 * i, 2 * i + 1]], bias_LF[0, i] = 1.0, -1.0
        own_FD[i, 4 + i] = 1.0
        if route == "merged":
            first_FD[i, 6 + i] = 1.0
            bias_LF[1, i] = -1.0
        elif route == "from_bits":
            encoder_LFD[1, i, [2 * i, 2 * i + 1]], bias_LF[1, i] = 1.0, -1.0
            second_FD[i, 6 + i] = 1.0
        else:
            encoder_LFD[1, i, 4 + i] = 1.0
            second_FD[i, 6 + i] = 1.0
    params = {
        "encoder": encoder_LFD,
        "encoder_bias": bias_LF,
        "decoder": {"to_0": own_FD[None], "to_1": np.stack([first_FD, second_FD])},
        "decoder_bias": np.zeros((2, D)),
        "threshold": np.full((2, F), 0.5),
    }
    floats = {k: v for k, v in params.items() if k != "decoder"}
    tree = {k: jnp.asarray(v, jnp.float32) for k, v in floats.items()}
    tree["decoder"] = {k: jnp.asarray(v, jnp.float32) for k, v in params["decoder"].items()}
    return Transcoder(tree, TranscoderConfig(2, D, F))


@pytest.mark.parametrize("route", ["merged", "from_bits", "two_hops"])
def test_the_route_of_a_transcoder_made_by_hand_has_the_whole_share(route):
    found = paths(_by_hand(route), RELAY, P)
    for name in ("merged", "from_bits", "two_hops"):
        assert getattr(found, name) == (1.0 if name == route else 0.0)
    assert found.unexplained == found.unexplained_result == 0.0
    # Each pair is 1 with probability P^2, and has one feature or two.
    expected = 2 * P**2 * (1 if route == "merged" else 2)
    assert found.l0 == pytest.approx(expected, rel=1e-12)


def test_paths_are_measured_with_exact_products(monkeypatch):
    """A CPU multiplies exactly anyway, so that the precision itself is looked at."""
    seen = []

    def watched(run):
        def watch(*arguments):
            seen.append(jax.config.jax_default_matmul_precision)
            return run(*arguments)

        return watch

    for name in ("encode", "decode"):
        monkeypatch.setattr(Transcoder, name, watched(getattr(Transcoder, name)))
    paths(_by_hand("merged"), RELAY, P)
    assert seen == [PRECISION, PRECISION]


def test_shares_weigh_what_is_written_and_what_is_read():
    mixed = _by_hand("two_hops")
    params = mixed.params
    # Half of each result from the first layer; a feature that reads a pair's AND and its two bits.
    first_FD, _ = 0.5 * _by_hand("merged").params["decoder"]["to_1"]
    params["decoder"]["to_1"] = jnp.stack([first_FD, 0.5 * params["decoder"]["to_1"][1]])
    encoder = params["encoder"].at[1, 0, :2].set(0.25).at[1, 1, 2:4].set(0.25)
    params["encoder"] = encoder.at[1, 0, 4].set(0.5).at[1, 1, 5].set(0.5)
    found = paths(mixed, RELAY, P)
    assert (found.merged, found.from_bits, found.two_hops) == (0.5, 0.25, 0.25)


def test_what_a_sparse_cross_layer_transcoder_of_a_relay_learns_is_merged():
    config = TwoHopConfig(groups=1, steps=1_000)
    found = trained(config, RELAY, 0, 0.1, 0)
    assert found.unexplained_result < 0.05
    assert found.merged > 0.5
    assert trained(config, RELAY, 1, 0.1, 0).merged == 0.0


def test_shares_of_every_transcoder_sum_to_one_and_the_report_has_a_line_of_each(tmp_path):
    config = smoke(TwoHopConfig())
    runs = measure(config, Work(tmp_path, "")).runs
    assert [(run.second_hop, run.window) for run in runs] == [
        ("relay", 0),
        ("relay", 1),
        ("and", 0),
        ("and", 1),
    ]
    for run in runs:
        shares = [run.paths.merged, run.paths.from_bits, run.paths.two_hops]
        assert sum(shares) == pytest.approx(1.0) or shares == [0.0, 0.0, 0.0]
        assert run.window == 0 or shares[0] == 0.0
    built = report.build(config, TwoHopSummary(runs, "cpu"), Path())
    assert sum("in two hops" in line for line in built.lines) == 4
    assert [section.title for section in built.sections()] == [
        "Paths to the results (relay)",
        "Paths to the results (and)",
    ]


def test_sparsities_that_are_nearly_equal_are_units_of_their_own():
    config = TwoHopConfig(sparsities=(0.1, 0.1000000001))
    ids = [unit.id for unit in plan(config)]
    assert len(set(ids)) == len(ids) == 2 * 2 * 2 * 3


def test_a_window_that_is_neither_is_refused():
    with pytest.raises(ValueError, match=r"config.windows = \(2,\) must be .* from 0 to 1"):
        TwoHopConfig(windows=(2,))
