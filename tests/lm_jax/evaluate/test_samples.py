"""Text of a model's own is distributed as the model says, resumable, and read as a corpus."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import lm_jax
from lm_jax.errors import BadInputError, StoppedError, UsageError
from lm_jax.evaluate import samples
from lm_jax.run import stop, user_cache
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import CorpusConfig, prepare_on_first
from lm_jax.text.tokenizer import Tokenizer
from tests import tiny

MODEL = "models/pair_small/dense/model"
LENGTH = 12


@pytest.fixture(scope="module")
def opened():
    return lm_jax.weights.load.open_pretrained(MODEL)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / samples.KIND


@pytest.fixture(scope="module")
def rows_BT(opened, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return np.stack(list(samples.sampled(opened, 0, rows=256, length=LENGTH, seed=1)))


def log_p(model, params, rows_BT):
    logits = tiny.forward(params, jnp.asarray(rows_BT, jnp.int32), model.cfg).logits[:, :-1]
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def test_losses_are_what_the_model_and_its_divergence_say(opened, rows_BT):
    """The loss of each token minus its expectation, given the text before, has mean zero."""
    model = opened.load()
    other = jax.tree.map(lambda x: x * 1.1, model.params)
    assert (rows_BT[:, 0] == 0).all() and rows_BT.shape == (256, LENGTH)
    own_BTV, other_BTV = log_p(model, model.params, rows_BT), log_p(model, other, rows_BT)
    p_BTV = np.exp(own_BTV)
    taken = rows_BT[:, 1:, None].astype(int)

    def z(values_BTV):
        seen = np.take_along_axis(values_BTV, taken, -1)[..., 0]
        mean = (p_BTV * values_BTV).sum(-1)
        variance = (p_BTV * values_BTV**2).sum(-1) - mean**2
        return (seen - mean).sum() / np.sqrt(variance.sum())

    assert abs(z(-own_BTV)) < 4
    # Loss of the other minus loss of the model is KL(model || other), token by token.
    divergence = (p_BTV * (own_BTV - other_BTV)).sum(-1)
    assert divergence.mean() > 0.01
    assert abs(z(own_BTV - other_BTV)) < 4


def test_sampling_goes_on_after_a_stop_and_more_rows_begin_with_the_same(opened, cache, rows_BT):
    parts = iter(samples.sampled(opened, 0, rows=256, length=LENGTH, seed=1))
    first = [next(parts) for _ in range(128)]
    stop.request()
    with pytest.raises(StoppedError, match="after 1 of 2 parts"):
        next(parts)
    stop._stop.clear()
    (folder,) = cache.iterdir()
    written = (folder / "000000.npy").stat().st_mtime_ns
    again = np.stack(list(samples.sampled(opened, 0, rows=256, length=LENGTH, seed=1)))
    assert (folder / "000000.npy").stat().st_mtime_ns == written
    np.testing.assert_array_equal(first, again[:128])
    np.testing.assert_array_equal(again, rows_BT)
    fewer = np.stack(list(samples.sampled(opened, 0, rows=130, length=LENGTH, seed=1)))
    np.testing.assert_array_equal(fewer, rows_BT[:130])


def test_rows_are_documents_of_a_prepared_corpus(opened, cache, tmp_path):
    corpus = CorpusConfig(f"samples:{MODEL}", splits=(0.7, 0.3, 0.0), max_tokens=128 * LENGTH)
    folder = tmp_path / "data"
    samples.prepare_samples(folder, corpus, context=LENGTH - 1, tokenizer=opened.tokenizer)
    prepared = prepare_on_first(folder, corpus, tokenizer=opened.tokenizer)
    counts = {name: each["documents"] for name, each in prepared.manifest["splits"].items()}
    assert sum(counts.values()) == 128 and counts["train"] > counts["validation"] > 0
    assert prepared.manifest["sources"] == {"samples of": opened.identity.text}
    # Each row is one example, without padding.
    examples = Examples(prepared, "train", context=LENGTH - 1, mode="window")
    assert examples.count == counts["train"] and examples.unused_tokens == 0
    # A prepared folder is opened, and another corpus refused.
    samples.prepare_samples(folder, corpus, context=LENGTH - 1, tokenizer=opened.tokenizer)
    with pytest.raises(UsageError, match="max_tokens"):
        prepare_on_first(folder, dataclasses.replace(corpus, max_tokens=9), tokenizer=None)
    assert samples.model_of(CorpusConfig("wiki")) is None


def test_the_first_of_several_processes_decides_whether_to_sample(monkeypatch, tmp_path):
    """One that looks after the first has finished must not skip what the first waits in."""
    corpus = CorpusConfig(f"samples:{MODEL}", max_tokens=100)
    asked = []
    monkeypatch.setattr(samples.processes, "on_first", lambda ask: asked.append(ask()) or 1)
    (tmp_path / samples.MANIFEST).touch()
    samples.prepare_samples(tmp_path, corpus, context=8, tokenizer=None)
    assert asked == [True]


@pytest.mark.parametrize(
    ("changes", "context", "error", "message"),
    [
        ({"max_tokens": 0}, 8, UsageError, "give the number of tokens"),
        ({}, 128, UsageError, "samples at most 128; lower it"),
        ({"source": "samples:no/such"}, 8, BadInputError, "no/such"),
    ],
)
def test_what_cannot_be_sampled_is_said(changes, context, error, message, opened, cache, tmp_path):
    corpus = dataclasses.replace(CorpusConfig(f"samples:{MODEL}", max_tokens=100), **changes)
    with pytest.raises(error, match=message):
        samples.prepare_samples(
            tmp_path / "data", corpus, context=context, tokenizer=opened.tokenizer
        )
    assert not (tmp_path / "data").exists()


def test_ids_of_another_tokenizer_are_refused_before_any_is_sampled(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "sampled", None)
    corpus = CorpusConfig(f"samples:{MODEL}", max_tokens=100)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    for other in (None, Tokenizer(backend, eos_id=0)):
        with pytest.raises(BadInputError, match="sample a model with its tokenizer"):
            samples.prepare_samples(tmp_path / "data", corpus, context=8, tokenizer=other)
