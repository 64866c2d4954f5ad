"""Prompts and scores of graphs, and what a transcoder is compared with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError
from lm_jax.model import params as params_lib
from lm_jax.model.sites import keep
from lm_jax.text.tokenizer_training import train_tokenizer
from lm_jax.train.objective import ignore_index_batch
from sparse_jax.graphs import attribute
from sparse_jax.studies.transcoders import neurons
from sparse_jax.studies.transcoders.scores import PromptSet, score_prompts, with_largest
from sparse_jax.transcoders.inputs import INPUT, OUTPUT, measure_scales
from sparse_jax.transcoders.objective import Frozen
from sparse_jax.transcoders.transcoder import (
    Transcoder,
    TranscoderConfig,
    equal_features,
    shuffled,
    spec,
)
from tests.sparse_jax.graphs import small_graphs


def prompts(count=2):
    return PromptSet(np.stack([small_graphs.small_tokens(seed) for seed in range(count)]))


def test_scores_are_means_over_the_graphs_of_the_prompts():
    model, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    result = score_prompts(model, transcoder, prompts(), max_features=20)
    each = [
        attribute(model, transcoder, tokens_T, max_features=20).scores()
        for tokens_T in prompts().tokens_BT
    ]
    for part in ("unpruned", "pruned"):
        got = dataclasses.asdict(getattr(result.mean, part))
        both = [dataclasses.asdict(getattr(scores, part)) for scores in each]
        assert got == {name: (both[0][name] + both[1][name]) / 2 for name in got}
    assert result.replacement_by_prompt == tuple(x.unpruned.replacement for x in each)
    assert (result.prompts, result.tokens, result.without_features) == (2, 6, 0)
    numbers = result.numbers()
    assert numbers["validation/pruned_graph/completeness"] == result.mean.pruned.completeness
    assert len(numbers) == 6


def test_a_prompt_without_active_features_is_counted_and_left_out():
    model, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    closed = dict(transcoder.params) | {
        "log_threshold": jnp.full_like(transcoder.params["log_threshold"], 20.0)
    }
    result = score_prompts(model, Transcoder(closed, transcoder.cfg), prompts(), max_features=20)
    assert result.mean is None and result.without_features == result.prompts == 2
    assert result.numbers() == {}


def from_forward(model, tokens_BT, *sites):
    """What a forward pass records, `[L, B T, ...]` in float64."""
    tokens_BT = jnp.asarray(tokens_BT, jnp.int32)
    record = dict.fromkeys(sites, keep)
    records = model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), record=record).records
    for name in sites:
        x = np.asarray(records[name], np.float64)
        yield x.reshape(len(x), -1, x.shape[-1])


def largest_by_hand(model, transcoder, tokens_BT):
    """Which neurons are kept `[L, X, F]`, by a sort of every token."""
    x_LXD, h_LXF = from_forward(model, tokens_BT, INPUT, neurons.HIDDEN)
    z_LXF = transcoder.encode(jnp.asarray(x_LXD, jnp.float32))
    count_X = np.asarray(z_LXF != 0).sum((0, 2))
    down_LFD = np.asarray(model.params["blocks"]["mlp"]["down"], np.float64)
    size_LXF = np.abs(h_LXF) * np.linalg.norm(down_LFD, axis=-1)[:, None]
    kept_LXF = np.zeros(h_LXF.shape, bool)
    for x, count in enumerate(count_X):
        order = np.argsort(-size_LXF[:, x].ravel(), kind="stable")[:count]
        kept_LXF[:, x].flat[order] = True
    return kept_LXF, count_X


def test_the_largest_neurons_are_as_many_as_the_features_of_each_token():
    model, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    kept_LXF, count_X = largest_by_hand(model, transcoder, prompts(1).tokens_BT)
    # Not the same number everywhere.
    assert len(set(count_X)) > 1 and count_X.max() < 3 * kept_LXF.shape[-1]
    basis = neurons.largest_neurons(model, transcoder)(small_graphs.small_tokens())
    np.testing.assert_array_equal(basis.kept_LTF, kept_LXF)
    assert neurons.keep_largest(jnp.ones((2, 3, 4)), jnp.array([0, 8, 9])).sum() == 16
    # A graph of them, whose errors are what the other neurons write.
    graph = attribute(model, basis, small_graphs.small_tokens())
    assert (graph.kinds == "feature").sum() == count_X.sum()
    result = score_prompts(
        model,
        transcoder,
        prompts(1),
        max_features=500,
        basis=neurons.largest_neurons(model, transcoder),
    )
    assert result.mean == graph.scores()


def test_the_reconstruction_of_the_largest_neurons_leaves_what_the_others_write():
    model, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    rows_BS = np.random.default_rng(2).integers(0, model.cfg.vocab_size, (2, 7)).astype(np.int32)
    batch = ignore_index_batch(jnp.asarray(rows_BS))
    scales = measure_scales(model, [batch], skip_start=1)
    got = neurons.reconstruct(
        Frozen(model, scales), transcoder, [batch], skip_start=1, outlier=100.0
    )
    kept_LXF, count_X = largest_by_hand(model, transcoder, rows_BS[:, :-1])
    h_LXF, y_LXD = from_forward(model, rows_BS[:, :-1], neurons.HIDDEN, OUTPUT)
    counted = np.tile(np.arange(6) >= 1, 2)
    down_LFD = np.asarray(model.params["blocks"]["mlp"]["down"], np.float64)
    scale_L11 = np.asarray(scales.output_L, np.float64)[:, None, None]
    left = scale_L11 * np.einsum("lxf,lfd->lxd", np.where(kept_LXF, 0.0, h_LXF), down_LFD)
    y_LXD = scale_L11 * y_LXD
    left_L = (left[:, counted] ** 2).sum((1, 2))
    y_LXD = y_LXD[:, counted]
    centred_L = ((y_LXD - y_LXD.mean(1, keepdims=True)) ** 2).sum((1, 2))
    # Sums of 10 tokens x 32 squares, of which means are taken away.
    np.testing.assert_allclose(got.unexplained_by_layer, left_L / centred_L, rtol=1e-4)
    assert got.unexplained == pytest.approx(left_L.sum() / centred_L.sum(), rel=1e-4)
    np.testing.assert_allclose(got.l0_by_layer, kept_LXF[:, counted].sum((1, 2)) / 10, rtol=1e-6)
    assert got.l0 == pytest.approx(count_X[counted].mean(), rel=1e-6)


def test_batchtopk_keeps_the_largest_of_all_prompts_together():
    model, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    kept = with_largest(model, transcoder, prompts(), active=2, skip_start=1)
    (x_LXD,) = from_forward(model, prompts().tokens_BT, INPUT)
    z_LXF = np.asarray(kept.encode(jnp.asarray(x_LXD, jnp.float32)))
    # Two features a layer at five tokens of either prompt.
    assert (z_LXF[:, np.tile(np.arange(6) >= 1, 2)] > 0).sum() == 2 * 3 * 5 * 2
    assert np.ptp(np.asarray(kept.theta_LF)) == 0 < kept.theta_LF.min()
    assert kept.cfg == transcoder.cfg


def test_prompts_are_the_beginnings_of_the_first_long_windows():
    rows_BS = np.arange(24).reshape(4, 6)
    rows_BS[1, 2:] = -1
    result = PromptSet.of_windows([rows_BS[:2], rows_BS[2:]], count=2, length=3)
    np.testing.assert_array_equal(result.tokens_BT, [[0, 1, 2], [12, 13, 14]])
    assert result.sha256 == PromptSet(result.tokens_BT.astype(np.int64)).sha256
    others = result.tokens_BT.reshape(3, 2), result.tokens_BT[::-1], result.tokens_BT + 1
    assert len({result.sha256, *(PromptSet(x).sha256 for x in others)}) == 4
    with pytest.raises(BadInputError, match="no window of 7 tokens"):
        PromptSet.of_windows([np.full((2, 7), -1)], count=2, length=7)


def test_texts_end_where_they_are_scored():
    texts = ["the cat sat on the mat", "a dog ran"]
    tokenizer = train_tokenizer(texts * 20, vocab_size=60)
    # Without the end that the tokenizer puts after a whole text.
    end = tokenizer.encode(texts[0])[-1]
    ids = [tokenizer.encode(text)[:-1] for text in texts]
    assert end == tokenizer.eos_id and end not in np.concatenate(ids)
    result = PromptSet.of_texts(texts, tokenizer, length=100)
    assert result.tokens_BT.shape == (2, min(map(len, ids)))
    for got, whole in zip(result.tokens_BT, ids, strict=True):
        assert list(got) == whole[-len(got) :]
    assert PromptSet.of_texts(texts, tokenizer, length=2).tokens_BT.shape == (2, 2)


@pytest.mark.parametrize(("layers", "window"), [(2, None), (4, None), (4, 2)])
def test_a_per_layer_transcoder_of_as_many_parameters(layers, window):
    cfg = TranscoderConfig(layers, 8, 96, window=window)
    features = equal_features(cfg, 1)
    sizes = [
        params_lib.count(spec(dataclasses.replace(cfg, window=1, features=features + more)))
        for more in (-1, 0, 1)
    ]
    wanted = params_lib.count(spec(cfg))
    assert abs(sizes[1] - wanted) <= min(abs(sizes[0] - wanted), abs(sizes[2] - wanted))
    # Encoders and decoders of 8 and two numbers a feature: 2 x 8 + 2 in one layer.
    assert sizes[2] - sizes[1] == layers * 18
    assert equal_features(dataclasses.replace(cfg, window=1), 1) == 96


def test_shuffled_decoders_go_together_into_all_targets():
    cfg = TranscoderConfig(3, 8, 16)
    whole = Transcoder(params_lib.init(jax.random.key(0), spec(cfg)), cfg)
    mixed = shuffled(whole, seed=1)
    for source in range(3):
        # Where each feature's own decoder came from is one order for all targets of its layer.
        orders = [
            [
                int(np.flatnonzero((np.asarray(whole.decoder(source, target)) == row).all(1))[0])
                for row in np.asarray(mixed.decoder(source, target))
            ]
            for target in cfg.targets(source)
        ]
        assert all(order == orders[0] for order in orders)
        assert sorted(orders[0]) == list(range(16)) != orders[0]
    for name in ("encoder", "encoder_bias", "log_threshold", "decoder_bias"):
        np.testing.assert_array_equal(mixed.params[name], whole.params[name])
