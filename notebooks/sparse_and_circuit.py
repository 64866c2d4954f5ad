# %% [markdown]
# # A sparse model and a circuit
#
# `pair_192` has a decoder of half a million parameters, and its sparse version: every
# attention edge (a head, a query, a key) has a gate, and post-training closed as many as the bound
# of its loss allowed.

# %%
import altair as alt
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax import report
import sparse_jax
from sparse_jax.circuits.curves import crossing
from sparse_jax.circuits.discover import head_curve, ranks
from sparse_jax.circuits.edge_graph import draw_open_edges
from sparse_jax.circuits.patching import head_effects
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import make_task

alt.renderers.enable("svg")  # needs no network; without this line charts zoom and have tooltips

# The dense model is the control: trained as long as the sparse one, with every edge open. Both come
# with the package; folders of your own do as well.
dense = lm_jax.load_pretrained("pair_192_control")
sparse = sparse_jax.load("pair_192_sparse")
sparse

# %% [markdown]
# ## Open edges
#
# The model reads a sentence; `aux` has how many edges are open, and of how many pairs.

# %%
text = "Then, Mary and John went to the park. John gave a book to"
ids = sparse.base.tokenizer.encode(text)
words = [sparse.base.tokenizer.decode([i]) for i in ids]
tokens_BT = jnp.array([ids])

out = sparse.forward(tokens_BT)
pairs = sparse.cfg.num_heads * out.aux["pairs_B"].sum()
share = float(out.aux["open_edges_BN"].sum() / pairs)
print(f"{share:.1%} of {int(pairs):,} edges are open")
assert share < 0.1  # on long texts 0.5 %: a query sees more keys there

# %% [markdown]
# All of them. A line leads from the token that is read, below, up to the token that reads it.

# %%
edges = sparse.open_edges(tokens_BT)
draw_open_edges(edges, words)

# %% [markdown]
# ## Which heads does one prompt need?
#
# Both models finish the sentence with the name that was said once. In the corrupt prompt of the
# pair the names are others. We run the clean prompt with the output of one head taken from the
# corrupt one: the change of the metric, logit of the right name minus that of a wrong one, is the
# exact effect of the head.

# %%
task = make_task("ioi", dense.tokenizer, count=8, seed=0)
batch = Batch.of(task)
print(task.examples[0].clean, "|", task.examples[0].corrupt)

models = {"dense": CircuitModel.of(dense), "sparse": CircuitModel.of(sparse)}
effect_LNB = {name: np.asarray(head_effects(model, batch)) for name, model in models.items()}
for name, model in models.items():
    solved = float((metric(model, batch, batch.clean_BT) > 0).mean())
    print(f"{name}: {solved:.0%} of {len(task.examples)} prompts solved")
    assert solved >= 0.75

# %%
report.heat_map(
    effect_LNB["sparse"][..., 0],
    caption="Effect of each head of the sparse model on the first prompt.",
    x_label="head",
    y_label="layer",
    value_label="change (logits)",
)

# %% [markdown]
# ## A circuit
#
# Keep the k heads of largest effect over all prompts, and give the others what they write on the
# corrupt prompt. How much of the metric do the k heads explain?

# %%
sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
curves = {}
for name, model in models.items():
    importance_LBN = -effect_LNB[name].swapaxes(1, 2)
    ranks_LBN = ranks(importance_LBN, whole_task=True)
    curves[name] = head_curve(model, batch, ranks_LBN, "counterfactual", sizes=sizes)
report.curves(
    [report.Series(name, curve.sizes, curve.explained) for name, curve in curves.items()],
    caption="Explained effect of the most important heads.",
    x_label="heads kept",
    y_label="explained effect",
    log_x=True,
    h_lines=[(0.9, "90 %")],
    n=len(task.examples),
)

# %%
for name, curve in curves.items():
    print(f"{name}: 90 % explained by {crossing(curve.sizes, curve.explained):.1f} of 64 heads")
    assert abs(curve.explained[-1] - 1) < 1e-3  # all heads are the whole model

# %% [markdown]
# Eight prompts give no interval. `iaj sparse circuits --pair=pair_192 --task=ioi` has
# them, for heads and for single edges, with random circuits of the same sizes beside.
