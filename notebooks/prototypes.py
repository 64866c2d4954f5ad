# %% [markdown]
# # Prototypes
#
# In a Prototype Transformer tokens do not attend to each other. Each token writes to R prototypes
# and reads what they hold, by two gates that sum to 1 and can be read and edited. This notebook
# trains a small one on a language of its own: nouns of one topic, so that after "the" only a
# memory of earlier nouns tells which come next.

# %%
import altair as alt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lm_jax
from lm_jax import report
from lm_jax.model.edits import OneLayer, Replace
from lm_jax.text.tokenizer_training import train_byte_tokenizer
from lm_jax.train.objective import next_token_batch, nll
import protot_jax
from protot_jax.mixers.gate_statistics import half_life
from protot_jax.studies.robustness.divergence import jensen_shannon

alt.renderers.enable("svg")  # needs no network; without this line charts zoom and have tooltips

STEPS = 600  # some seconds

topics = [
    ["anchor", "harbour", "sail", "wave", "sailor", "ship", "tide", "island"],
    ["barn", "cow", "field", "harvest", "horse", "plough", "sheep", "tractor"],
    ["judge", "law", "lawyer", "sentence", "trial", "verdict", "witness", "jury"],
    ["bread", "butter", "cook", "flour", "oven", "salt", "soup", "spoon"],
]
rng = np.random.default_rng(0)
texts = [
    " and".join(f" the {noun}" for noun in rng.permutation(topics[i % 4])[:5]) for i in range(400)
]
tokenizer = train_byte_tokenizer(texts, vocab_size=400)
rows_XS = np.array([tokenizer.encode(text) for text in texts])
print(f"{len(texts)} sentences of {rows_XS.shape[1]} tokens, such as:{texts[0]}")

# %% [markdown]
# ## Training

# %%
cfg, mixer = protot_jax.build_model(
    "protot",
    hidden_size=32,
    num_layers=2,
    vocab_size=tokenizer.vocab_size,
    context=32,
    tie_embeddings=True,
    num_prototypes=8,
)
optimiser = optax.adam(5e-3)


@jax.jit
def train(params, tokens_XBS):
    def update(carry, tokens_BS):
        params, state = carry
        batch = next_token_batch(tokens_BS, padding=-1)

        def loss(params):
            output = lm_jax.forward(params, batch.input_BT, cfg, mixer=mixer)
            return nll(output, params, cfg, batch).sum() / batch.target_BT.size

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(update, (params, optimiser.init(params)), tokens_XBS)
    return params, losses


params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
batches_XBS = np.random.default_rng(0).choice(rows_XS, (STEPS, 32))
params, losses = train(params, batches_XBS)
report.curves(
    [report.Series("", np.arange(STEPS), losses)],
    caption="Training loss.",
    x_label="update",
    y_label="loss (nats per token)",
)

# %% [markdown]
# Did it learn the topics? The loss at the last noun is ln 32 = 3.47 for one who knows all nouns,
# and ln 8 = 2.08 for one who remembers the topic.

# %%
record = {"mixer.write": lm_jax.keep, "mixer.read": lm_jax.keep}


@jax.jit
def run(tokens_BT, edits):
    return lm_jax.forward(params, tokens_BT, cfg, mixer=mixer, edits=edits, record=record)


def loss_of_last_noun(edits):
    logits_XV = run(rows_XS[:, :-1], edits).logits[:, -1]
    log_p_XV = jax.nn.log_softmax(logits_XV)
    return -float(log_p_XV[np.arange(len(texts)), rows_XS[:, -1]].mean())


untouched = loss_of_last_noun({})
print(f"{untouched:.2f} nats")
assert untouched < 2.6

# %% [markdown]
# ## An edit of one prototype
#
# What if no token reads one prototype? All sixteen, one after the other; layer and prototype are
# data, so that the sweep compiles once. One prototype may hold the topic, or several the same of
# it, and then none of them is missed alone; so the whole layer is closed as well.

# %%
closed_LR = [
    [
        loss_of_last_noun(protot_jax.edit(layer=layer, prototype=r, mode="zero_read"))
        for r in range(mixer.num_prototypes)
    ]
    for layer in range(cfg.num_layers)
]
layer, prototype = map(int, np.unravel_index(np.argmax(closed_LR), (2, 8)))
print(f"most is lost without prototype {prototype} of layer {layer}")
closed = loss_of_last_noun(
    {"mixer.read": OneLayer(layer, Replace(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1), bool)))}
)
print(f"{closed:.2f} nats without the whole layer")
assert untouched < closed_LR[layer][prototype]
assert closed > untouched + 0.5
report.heat_map(
    np.array(closed_LR) - untouched,
    caption="Loss at the last noun that closing the read gate of one prototype adds.",
    x_label="prototype",
    y_label="layer",
    value_label="nats",
    show_values=True,
    spec=".2f",
)

# %% [markdown]
# ## The gates of a sentence
#
# Who writes to that prototype, and who reads it? Nouns do the one, and "the" the other.

# %%
sentence = " the sail and the sailor and the ship and the"
ids = tokenizer.encode(sentence)
words = [tokenizer.decode([i]) for i in ids]
out = run(jnp.array([ids]), {})
for name in ("write", "read"):
    gate_TR = np.asarray(out.records[f"mixer.{name}"])[layer, 0]
    assert np.allclose(gate_TR.sum(-1), 1, atol=1e-5)
both_TR = np.concatenate([np.asarray(out.records[site])[layer, 0] for site in record], axis=1)
report.heat_map(
    both_TR,
    caption=f"Gates of layer {layer}: writing on the left, reading on the right.",
    x_label="prototype",
    y_label="token",
    value_label="gate",
    row_labels=words,
    column_labels=[f"{kind}{r}" for kind in "wr" for r in range(mixer.num_prototypes)],
    value_range=(0, 1),
)

# %% [markdown]
# ## One step of the mixer
#
# The last "the" reads. Every prototype holds a mean of the values written to it, in which a token
# k steps back weighs beta^k times its write gate; the read gate says how much of each mean is
# taken. The product of both is the share of every earlier token in the output, prototype by
# prototype: a step is this one matrix, and its entries sum to 1.

# %%
write_TR, read_TR = (np.asarray(out.records[site])[layer, 0] for site in record)
decay_R = 1 / (1 + np.exp(-np.asarray(params["blocks"]["mixer"]["decay_logit"])[layer]))
back_K = np.arange(len(ids) - 1, 0, -1)
weight_RK = decay_R[:, None] ** back_K * write_TR[:-1].T
share_RK = read_TR[-1][:, None] * weight_RK / weight_RK.sum(1, keepdims=True)
assert np.isclose(share_RK.sum(), 1, atol=1e-5)

# The mixer's own, from the gates of this sentence.
gates = {site: out.records[site][:, 0] for site in record}
frozen = mixer.freeze(params["blocks"]["mixer"], gates)
assert np.allclose(share_RK, frozen.pattern_LNTS[layer, :, -1, :-1], atol=1e-5)
report.heat_map(
    share_RK,
    caption=f"What the last token of the sentence reads in layer {layer}.",
    x_label="token whose value it is",
    y_label="prototype",
    value_label="share of the output",
    column_labels=[f"{i}{word}" for i, word in enumerate(words[:-1])],
)

# %% [markdown]
# A prototype forgets: after its half-life a write has half of its weight. All began at 6.6 tokens.

# %%
half_life_R = half_life(np.asarray(params["blocks"]["mixer"]["decay_logit"])[layer])
report.bars(
    [report.Bar(f"prototype {r}", value) for r, value in enumerate(half_life_R)],
    caption=f"Half-lives in layer {layer}.",
    x_label="half-life (tokens)",
)

# %% [markdown]
# ## A typo
#
# How far does the distribution of the next noun move if one letter is wrong, and how far in a
# sentence of another topic? The Jensen-Shannon divergence is 0 to ln 2 = 0.69 nats.

# %%
divergence = {}
for name, other in {
    "typo": " the sail and the sailer and the ship and the",
    "other topic": " the judge and the law and the verdict and the",
}.items():
    logits_V = run(jnp.array([tokenizer.encode(other)]), {}).logits[0, -1]
    divergence[name] = float(jensen_shannon(out.logits[0, -1], logits_V))
    print(f"{name:<12} {divergence[name]:.3f} nats")
assert divergence["typo"] < divergence["other topic"] <= np.log(2)

# %% [markdown]
# `iaj protot pretrain` trains on text of yours, `concepts` and `intervene` ask what prototypes
# capture with intervals and controls, and `robustness` measures eight kinds of such changes.
