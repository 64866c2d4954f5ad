# %% [markdown]
# # A first look
#
# A pretrained model, what happens inside it on five tokens, and two changes: the attention of a
# layer writes nothing, and a polynomial takes the place of softmax in some heads.
#
# SmolLM2-135M-Instruct with 4-bit weights comes by `iaj fetch smollm2`; a Hugging Face folder or a
# `.gguf` file of yours does as well, with other numbers.

# %%
import altair as alt
import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax import report
import polyattn_jax
from protot_jax.studies.robustness.divergence import jensen_shannon

alt.renderers.enable("svg")  # needs no network; without this line charts zoom and have tooltips

model = lm_jax.load_pretrained("smollm2")
model

# %% [markdown]
# ## What can be read and edited
#
# Every place inside a forward pass has a name, and a shape in letters: layer L (in front, not
# written), batch B, query T, key S, head N, width of a head H.

# %%
for name in ("resid_pre", "attn.scores", "attn.pattern", "attn.z", "mlp.post"):
    site = lm_jax.SITES[name]
    print(f"{name:<13} {site.dims:<5} {site.about}")

# %%
ids = model.tokenizer.encode("The capital of France is")
words = [model.tokenizer.decode([i]) for i in ids]
tokens_BT = jnp.array([ids])

record = {"attn.pattern": lm_jax.keep, "attn.scores": lm_jax.keep}
out = lm_jax.forward(model.params, tokens_BT, model.cfg, record=record)
out

# %%
log_p = jax.nn.log_softmax(out.logits[0, -1])
for i in np.argsort(-log_p)[:5].tolist():
    print(f"{np.exp(log_p[i]):6.1%} {model.tokenizer.decode([i])!r}")

(answer,) = model.tokenizer.encode(" Paris")
assert log_p.argmax() == answer

# %% [markdown]
# ## Attention
#
# How much of its attention does each head give to the token before? The diagonal under the main
# one, averaged over queries.

# %%
pattern_LNTS = np.asarray(out.records["attn.pattern"])[:, 0]
previous_LN = pattern_LNTS.diagonal(-1, axis1=2, axis2=3).mean(-1)
report.heat_map(
    previous_LN.T,
    caption="Attention to the token before.",
    x_label="layer",
    y_label="head",
    value_label="share",
    value_range=(0, 1),
)

# %%
layer, head = map(int, np.unravel_index(previous_LN.argmax(), previous_LN.shape))
report.heat_map(
    pattern_LNTS[layer, head],
    caption=f"The head that attends to it most: layer {layer}, head {head}.",
    x_label="key",
    y_label="query",
    row_labels=words,
    column_labels=words,
    show_values=True,
    spec=".2f",
)

# %% [markdown]
# ## An edit
#
# The 30 rows of a batch are the same prompt, and in row l the heads of layer l write nothing. The
# site is fixed when the pass is compiled, the values are data: a sweep compiles once.

# %%
L = model.cfg.num_layers
scale_LBTNH = (1.0 - jnp.eye(L))[:, :, None, None, None]
edits = {"attn.z": lm_jax.Scale(scale_LBTNH)}
edited = lm_jax.forward(model.params, jnp.tile(tokens_BT, (L, 1)), model.cfg, edits=edits)
without_B = jax.nn.log_softmax(edited.logits[:, -1])[:, answer]
report.curves(
    [report.Series("", np.arange(L), without_B)],
    caption="Log-probability of Paris without the attention of one layer.",
    x_label="layer",
    y_label="log-probability (nats)",
    h_lines=[(float(log_p[answer]), "untouched")],
)

# %% [markdown]
# ## S_p, and a polynomial in place of softmax
#
# With weights (score + b)^p where that is positive, a row of scores gives its largest key the share
# 1 / (1 + S_p): more than half where S_p < 1. Such a row is called safe. `iaj polyattn audit`
# calibrates b for a model.

# %%
degrees = (2, 4, 8, 16)
scores_LNTS = np.asarray(out.records["attn.scores"])[:, 0]
stats = polyattn_jax.row_stats(scores_LNTS[:, :, -1], bias=0.403, degrees=degrees)
safe_P = (stats.s_p < 1).mean((0, 1))
assert (np.diff(safe_P) >= 0).all()  # a higher power makes no row less safe
report.bars(
    [report.Bar(f"p = {p}", 100 * share) for p, share in zip(degrees, safe_P, strict=True)],
    caption="Safe rows of the last token, over all heads.",
    x_label="share (%)",
    x_range=(0, 100),
    n=stats.s_p[..., 0].size,
)

# %% [markdown]
# Replaced in the 90 heads of smallest S_4 in this row, in the 90 of largest, and in all 270. The
# Jensen-Shannon divergence of the next token from that of softmax is 0 to ln 2 = 0.69 nats.

# %%
row_map = polyattn_jax.parse_recipe("relu:p=4,b=0.403").map
rank_LN = stats.s_p[..., 1].ravel().argsort().argsort().reshape(L, -1)
sets = {"smallest S_4": rank_LN < 90, "largest S_4": rank_LN >= 180, "all heads": rank_LN >= 0}
divergence = {}
for name, heads_LN in sets.items():
    attend = polyattn_jax.substitute([row_map], 0, 0.403, jnp.asarray(heads_LN))
    replaced = lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend)
    divergence[name] = float(jensen_shannon(out.logits[0, -1], replaced.logits[0, -1]))
    probability = float(jax.nn.softmax(replaced.logits[0, -1])[answer])
    print(f"{name:<13} divergence {divergence[name]:.4f}, probability of Paris {probability:.2f}")
assert divergence["largest S_4"] < divergence["smallest S_4"] < divergence["all heads"]

# %% [markdown]
# The heads of largest S_4 are not the ones that it hurts to replace here: S_p says whether a map
# can single out one key, and a head that spreads its attention need not do so. One prompt of five
# tokens shows how it is done, and no more. Whether a replacement holds is what
# `iaj polyattn check` decides, on a hundred prompts and with an interval.
