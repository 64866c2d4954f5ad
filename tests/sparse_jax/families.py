"""Small models of the families that have a recipe, with scores as spread as pretrained ones have.

And SmolLM2 with text, where both are there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.text.examples import Batches, Examples
from lm_jax.text.preparation import CorpusConfig, prepare_corpus
from lm_jax.train.objective import ignore_index_batch
from tests import tiny

# The changes of `tiny.decoder` that make each family. Groups of query heads as in Llama 3.2.
FAMILIES = {
    "gpt2": {**tiny.GPT2, "family": "gpt2"},
    "olmo": {"family": "olmo"},
    "llama": {"family": "llama", "num_heads": 4, "num_kv_heads": 2},
}
# Standard deviation of the scores of a head that spreads least.
SPREAD = 2.0
OUTPUT = 2.0


@functools.partial(jax.jit, static_argnames="cfg")
def scored(params, tokens_BT, cfg, valid_BT=None):
    """The forward pass with its scores."""
    record = {"attn.scores": lm_jax.keep}
    return lm_jax.forward(params, tokens_BT, cfg, valid_BT=valid_BT, record=record)


@functools.cache
def spread_model(family):
    """A model whose heads have scores of different spread, from `SPREAD` to three times it."""
    cfg = tiny.decoder(**FAMILIES[family])
    params = jax.tree.map(lambda x: 3.0 * x, dict(tiny.params(cfg)))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 40, (8, 24)), jnp.int32)
    mixer = params["blocks"]["mixer"]
    # So that what is attended to decides what is predicted.
    for tree, name in ((mixer, "v"), (mixer, "o"), (params, "unembed")):
        tree[name] = OUTPUT * tree[name]
    wanted_N = SPREAD * np.linspace(1.0, 3.0, cfg.num_heads)
    for layer in range(cfg.num_layers):
        # A later layer reads what the layers before it write with the scaled scores.
        output = scored(params, tokens_BT, cfg)
        scores_BNTS = np.asarray(output.records["attn.scores"][layer])
        deviation_N = [
            scores_BNTS[:, head][np.isfinite(scores_BNTS[:, head])].std()
            for head in range(cfg.num_heads)
        ]
        factor_N = jnp.asarray(wanted_N / deviation_N, jnp.float32)
        for name, letters in (("q", (None, slice(None), None)), ("q_bias", (slice(None), None))):
            if name in mixer:
                mixer[name] = mixer[name].at[layer].multiply(factor_N[letters])
    return cfg, params


def smollm2_batches(folder):
    """SmolLM2, and batches of the training text of its recipe and of held-out text."""
    base = lm_jax.load_pretrained("smollm2")
    text = CorpusConfig("wiki", "document", splits=(0.9, 0.1, 0.0), max_tokens=60_000)
    prepared = prepare_corpus(folder / "data", text, tokenizer=base.tokenizer)

    def windows(split, count):
        examples = Examples(
            prepared, split, context=64, mode="window", vocab_size=base.cfg.vocab_size
        )
        drawn = Batches(examples, seed=0, batch_size=count).at(0)
        return ignore_index_batch(jnp.asarray(drawn["tokens"]))

    return base, windows("train", 32), windows("validation", 24)
