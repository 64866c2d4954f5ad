"""Documents that are packed into a row are read, and learned from, as each of them alone."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.mixers import AttentionMixer
from lm_jax.run.config import from_plain
from lm_jax.text.examples import OnePass
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, PackedBatch
import protot_jax
from protot_jax.mixers import models
from protot_jax.mixers.reference_code import released_prefix_mean
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import saved_run
from protot_jax.training.config import PretrainConfig
from tests import rounding, tiny
from tests.protot_jax.small_runs import settings

END, VOCAB = 4, 30
LENGTHS = (6, 1, 2, 19, 9)
# A Prototype Transformer with positions, which start again at every document.
ROTARY = "protot, rotary"
# Small enough to trace, with every mixer's own parts.
FIELDS = {
    "protot": {"num_prototypes": 5},
    ROTARY: {"num_prototypes": 5, "rotary_queries": True, "rotary_values": True},
    "gated_slots": {"num_slots": 5},
    "raven": {"num_slots": 5, "written": 2},
    "mamba": {"state_size": 3},
    "mamba_ffn": {"state_size": 3},
}


def built(name):
    """A model whose every scalar is away from its start, so that tokens move the state."""
    cfg, mixer = protot_jax.build_model(
        name.split(",")[0],
        hidden_size=16,
        num_layers=2,
        vocab_size=VOCAB,
        context=64,
        tie_embeddings=False,
        **FIELDS.get(name, {}),
    )
    rng = np.random.default_rng(0)
    spec = lm_jax.param_spec(cfg, mixer)
    draw = lambda spec: jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32)  # noqa: E731
    return cfg, mixer, lm_jax.params.tree_map(draw, spec)


@pytest.fixture(scope="module")
def documents():
    """Ids of documents, each with its end."""
    rng = np.random.default_rng(1)
    return [np.append(rng.integers(END + 1, VOCAB, n), END).astype(np.int32) for n in LENGTHS]


# One with rotary positions has all that one without them has.
@pytest.mark.parametrize("name", [ROTARY, *sorted(models.MODELS.keys() - {"protot", "mamba_ffn"})])
def test_a_packed_row_is_its_documents_alone(name, documents):
    cfg, mixer, params = built(name)
    row_BS = np.concatenate([*documents, [7]])[None]
    batch = PackedBatch(END)(row_BS)
    np.testing.assert_array_equal(
        np.repeat(np.arange(len(documents)), [len(d) for d in documents]), batch.document_BT[0]
    )
    # The first token of a document is no target: it is predicted from another one's end.
    ends_T = np.cumsum([len(d) for d in documents]) - 1
    assert not batch.loss_mask_BT[0, ends_T].any()
    assert batch.loss_mask_BT.sum() == row_BS.size - 1 - len(documents)

    @jax.jit
    def packed(params):
        return lm_jax.forward(
            params, batch.input_BT, cfg, mixer=mixer, document_BT=batch.document_BT
        ).logits[0]

    # What stands to the right of a token is not read, so one padded batch has all of them alone.
    padded_BT = np.zeros((len(documents), max(map(len, documents))), np.int32)
    for row, ids in zip(padded_BT, documents, strict=True):
        row[: len(ids)] = ids
    alone = rounding.expected(
        lambda p: lm_jax.forward(p, padded_BT, cfg, mixer=mixer).logits, params
    )
    logits_TV, first = packed(params), 0
    for document, ids in enumerate(documents):
        last = first + len(ids)
        read = jax.tree.map(operator.itemgetter((document, slice(len(ids)))), alone)
        rounding.assert_within(logits_TV[first:last], read)
        first = last
    joined = tiny.forward(params, batch.input_BT, cfg=cfg, mixer=mixer).logits[0]
    assert np.abs(joined - logits_TV)[len(documents[0]) :].max() > 0.01


@pytest.mark.parametrize("name", ["protot", "mamba", "gated_slots"])
def test_a_packed_row_teaches_what_its_documents_teach(name, documents):
    """Backward passes written by hand, and one that is not: gradients of the summed loss."""
    cfg, mixer, params = built(name)
    packed = LanguageModelling(cfg, mixer, make_batch=PackedBatch(END))
    apart = LanguageModelling(cfg, mixer)
    documents = documents[:4]
    row_BS = np.concatenate([*documents, [7]])[None]
    padded_BS = np.zeros((len(documents), 2 + max(map(len, documents))), np.int32)
    for row, ids in zip(padded_BS, documents, strict=True):
        row[: len(ids)] = ids
    assert packed.normalizers(row_BS) == apart.normalizers(padded_BS)

    def gradient(objective, tokens_BS):
        def loss(params):
            return objective.evaluate(params, (), tokens_BS)["loss"]

        return lambda params: jax.grad(loss)(params)

    alone = rounding.expected(gradient(apart, padded_BS), params)
    rounding.assert_within(jax.jit(gradient(packed, row_BS))(params), alone)


@pytest.mark.slow
def test_a_run_of_every_option_trains_on_packed_rows_and_evaluates_them(text, tmp_path):
    config = settings(text, examples="pack", max_steps=2, dtype="float32")
    config.prototypes.update(
        num_prototypes=8, heads=2, routing="top_k", top_k=2, prototype_dropout=0.2
    )
    config.prototypes.update(entropy_weight=0.1, balance_weight=0.1)
    config.prototypes.update(rotary_queries=True, rotary_values=True)
    summary = run_in(config, tmp_path / "run")
    data = saved_run.load_data(from_plain(config, PretrainConfig), tmp_path / "run/data")
    end = data.prepared.tokenizer.backend.token_to_id("<eot>")
    rows = OnePass(data.validation, batch_size=data.validation.count).at(0)["tokens"]
    targets = rows[:, 1:].size - (rows[:, :-1] == end).sum()
    assert (rows[:, :-1] == end).any()
    assert summary.seeds[0].validation_tokens == targets
    steps = pq.read_table(tmp_path / "run/seed_234" / METRICS).to_pylist()
    # At most ln 4 for the four prototypes of a head, and ln 2 for the two that take part.
    assert all(0 < row["gate_entropy"] <= np.log(2) for row in steps)
    assert all(0 < row["gate_balance"] <= np.log(4) for row in steps)
    assert protot_jax.load_run(tmp_path / "run").prototypes.heads == 2


class Forgetful(AttentionMixer):
    """A mixer that does not say that it separates documents."""

    separates_documents = False


def test_documents_are_refused_where_they_would_mix(documents):
    cfg, mixer, params = built("llama")
    tokens_BT, document_BT = documents[0][None], np.zeros((1, len(documents[0])), np.int32)
    with pytest.raises(UsageError, match="Forgetful does not reset its state between documents"):
        lm_jax.forward(params, tokens_BT, cfg, mixer=Forgetful(), document_BT=document_BT)
    with pytest.raises(UsageError, match="a cache holds one document a row"):
        lm_jax.forward(
            params,
            tokens_BT,
            cfg,
            mixer=mixer,
            document_BT=document_BT,
            cache=lm_jax.init_cache(cfg, 1, 8, mixer=mixer),
        )
    with pytest.raises(UsageError, match=r"config\.arithmetic = 'released' cannot"):
        PretrainConfig(arithmetic="released", examples="pack")
    cfg, mixer, params = built("protot")
    released = type(mixer)(num_prototypes=5, prefix=released_prefix_mean)
    with pytest.raises(UsageError, match="no resets between documents"):
        lm_jax.forward(params, tokens_BT, cfg, mixer=released, document_BT=document_BT)
