"""The published models do what their summaries and docs/protot.md say of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import MANIFEST, open_prepared
import protot_jax
from protot_jax.exported import read_manifest
from protot_jax.judging.__main__ import data_identity
from protot_jax.results import PretrainSummary
from protot_jax.saved_run import DATA

MODELS = Path(__file__).parents[2] / "models"
KINDS = ("protot", "llama", "mamba", "deltanet")
BATCH = 50


def folder_of(model):
    return MODELS / f"{model.config.model}_small"


def rows_of(model, split):
    """The documents of a split that it was evaluated on, in batches of ids."""
    data = open_prepared(folder_of(model) / DATA, tokenizer=model.tokenizer)
    limit = getattr(model.config, f"{split}_documents")
    examples = Examples(data, split, context=model.config.context, limit=limit)
    for at in range(0, examples.count, BATCH):
        yield examples.read(np.arange(at, min(at + BATCH, examples.count)))["tokens"]


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_it_has_the_perplexity_of_its_summary_and_of_the_docs(kind):
    model = protot_jax.load_run(MODELS / f"{kind}_small")
    folder = folder_of(model)

    @jax.jit
    def losses(tokens_BT):
        """Of each next token, 0 at padding."""
        target_BT = tokens_BT[:, 1:]
        logits_BTV = lm_jax.forward(
            model.params, tokens_BT[:, :-1], model.cfg, mixer=model.mixer
        ).logits
        own_BT = jnp.take_along_axis(logits_BTV, target_BT[..., None], axis=-1)[..., 0]
        return jnp.where(target_BT == 0, 0.0, jax.nn.logsumexp(logits_BTV, axis=-1) - own_BT)

    (own,) = load_result(folder / "summary.json", PretrainSummary).seeds
    assert read_manifest(folder, best=True)["step"] == own.best.step == 843
    total, tokens = np.float64(0), 0
    for rows in rows_of(model, "test"):
        total += np.asarray(losses(rows), np.float64).sum()
        tokens += int((rows[:, 1:] != 0).sum())
    assert tokens == own.test_tokens
    # A token's loss is a sum of float32 in another order, wrong by some 1e-5 of its 4.5 nats.
    np.testing.assert_allclose(np.exp(total / tokens), own.best.test_perplexity, rtol=2e-4)
    page = (MODELS.parent / "docs" / "protot.md").read_text("utf-8")
    assert f"`models/{folder.name}` ({own.best.test_perplexity:.1f})" in page
    if kind == "protot":
        assert f"| default | {own.best.test_perplexity:.1f}, to all digits as above |" in page


def test_the_four_were_trained_and_are_evaluated_on_the_same_documents():
    manifests = [read_json(MODELS / f"{kind}_small" / DATA / MANIFEST) for kind in KINDS]
    assert len({data_identity(one) for one in manifests}) == 1
    assert len({one["splits"]["test"]["documents"] for one in manifests}) == 1


def test_one_prototype_writes_where_the_word_album_is():
    """Its share of writing on the word, and on all other tokens, much as docs/protot.md has it."""
    model = protot_jax.load_run(MODELS / "protot_small")

    @jax.jit
    def write_gates(tokens_BT):
        last_B1 = jnp.full((len(tokens_BT), 1), tokens_BT.shape[1] - 1)
        out = lm_jax.forward(
            model.params,
            tokens_BT,
            model.cfg,
            mixer=model.mixer,
            record={"mixer.write": lm_jax.keep},
            logits_at=last_B1,
        )
        return out.records["mixer.write"][2, :, :, 3]

    (album,) = (i for i in range(model.cfg.vocab_size) if model.tokenizer.token(i) == "album</w>")
    on, off = [], []
    for rows in rows_of(model, "validation"):
        gate_BT = np.asarray(write_gates(rows))
        on.append(gate_BT[rows == album])
        off.append(gate_BT[(rows != album) & (rows != 0)])
    on, off = np.concatenate(on), np.concatenate(off)
    assert len(on) >= 30
    assert on.mean() > 0.7 and off.mean() < 0.06
