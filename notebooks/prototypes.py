# %% [markdown]
# # Prototypes
#
# In a Prototype Transformer tokens do not attend to each other. Each token writes to R prototypes
# and reads what they hold, by two gates that sum to 1 and can be read and edited. This notebook
# trains a small one on a language of its own, in which the last word was said eleven tokens before.

# %%
import altair as alt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lm_jax
from lm_jax import report
from lm_jax.text.tokenizer_training import train_byte_tokenizer
from lm_jax.train.objective import next_token_batch, nll
import protot_jax
from protot_jax.concepts.measures import half_life
from protot_jax.robustness.divergence import jensen_shannon

alt.renderers.enable("svg")  # needs no network; without this line charts zoom and have tooltips

STEPS = 300  # some seconds

names = ["Anna", "Clara", "Emma", "Grace", "Iris", "Julia", "Mary", "Olga"]
pets = ["cat", "dog", "horse", "goat", "rabbit", "parrot", "mouse", "snake"]
weathers = ["It rained all day", "It snowed all night", "The sun was out"]
texts = [
    f"{name} has a {pet} . {weather} . Now {name} feeds her {pet}"
    for name in names
    for pet in pets
    for weather in weathers
]
tokenizer = train_byte_tokenizer(texts, vocab_size=400)
rows_XS = np.array([tokenizer.encode(text) for text in texts])
print(f"{len(texts)} sentences of {rows_XS.shape[1]} tokens, such as: {texts[0]}")

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
optimiser = optax.adam(1e-2)


@jax.jit
def update(params, state, tokens_BS):
    batch = next_token_batch(tokens_BS, padding=-1)

    def loss(params):
        output = lm_jax.forward(params, batch.input_BT, cfg, mixer=mixer)
        return nll(output, params, cfg, batch).sum() / batch.target_BT.size

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimiser.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
state, losses, rng = optimiser.init(params), [], np.random.default_rng(0)
for _ in range(STEPS):
    params, state, loss = update(params, state, jnp.asarray(rng.choice(rows_XS, 32)))
    losses.append(float(loss))

chance = (np.log(8) + np.log(8) + np.log(3)) / (rows_XS.shape[1] - 1)
report.curves(
    [report.Series("", np.arange(STEPS), losses)],
    caption="Training loss.",
    x_label="update",
    y_label="nats per token",
    h_lines=[(chance, "of one who remembers")],
)
