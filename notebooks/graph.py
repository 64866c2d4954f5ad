# %% [markdown]
# # An attribution graph
#
# What causes the next token of a prompt, and through which heads? The nodes of the graph are the
# tokens and the neurons of a model's own MLPs, so that nothing has to be trained first.

# %%
import altair as alt
import numpy as np

import lm_jax
from lm_jax import report
from sparse_jax.graphs import neurons

alt.renderers.enable("svg")  # needs no network; without this line charts zoom and have tooltips

# A small model that comes with the package; a folder of your own does as well.
model = lm_jax.load_pretrained("pair_192_control")
model

# %%
ids = model.tokenizer.encode("Then, Mary and John went to the park. John gave a book to")
words = [model.tokenizer.decode([i]) for i in ids]
graph = neurons.graph(model, ids, max_features=32)
graph

# %% [markdown]
# With a transcoder (`iaj sparse transcoder`), whose features are sparser than neurons, it is
# `sparse_jax.graphs.attribute(model, transcoder, ids)`, and all that follows is the same.
#
# ## Is the graph right?
#
# A row of its matrix holds what each source adds to the input of one target, in a model whose
# attention patterns and norms are frozen. Row and bias must sum to what the forward pass had:

# %%
largest = graph.certificate().max()
print(f"largest error of a row: {largest:.1e}")
assert largest < 1e-4

# %% [markdown]
# ## Who has the most influence on the next token?
#
# `prune` keeps the nodes that carry 80 % of the influence on the logits, and the edges between them
# that carry 95 % of theirs.

# %%
pruned = graph.prune()
scores = graph.scores(pruned)
print(f"{pruned.kept_S.sum()} of {graph.num_sources} sources and {pruned.kept_RS.sum()} edges kept")
print(f"replacement {scores.pruned.replacement:.2f}, completeness {scores.pruned.completeness:.2f}")
nodes = graph.nodes.to_pylist()


def name(node: int) -> str:
    kind, layer, position, feature = list(nodes[node].values())[:4]
    if kind == "logit":
        return f"next:{model.tokenizer.decode([feature])}"
    place = f"{position}{words[position]}"
    part = {"feature": f"neuron {layer}.{feature}", "error": f"error {layer}", "token": "token"}
    return f"{part[kind]} at {place}"


# %%
top = np.argsort(-pruned.influence_S)[:12].tolist()
report.bars(
    [report.Bar(name(source), pruned.influence_S[source]) for source in top],
    caption="The twelve sources of most influence.",
    x_label="influence on the logits",
    spec=".3f",
)

# %% [markdown]
# An error is what the neurons without a node write. *Replacement* is the share of tokens in the
# influence of tokens and errors: where it is low, much of the story is in nodes without a name.
#
# ## Through which heads does an edge go?
#
# From the first *Mary* to the most likely next token.

# %%
source = int(np.flatnonzero(graph.kinds == "token")[words.index(" Mary")])
target = int(np.flatnonzero(graph.kinds == "logit")[0])
(weight,) = graph.edge_weights([(source, target)])
(mediation,) = graph.mediations([(source, target)])
shares_LNTS = np.asarray(mediation.score_XLNTS[0])
# In each layer heads, paths past them and paths that begin later sum to the edge.
assert mediation.certificate(np.array([weight])).max() < 1e-4
print(f"{name(source)} adds {weight:+.2f} to the logit of {name(target)}")
report.heat_map(
    shares_LNTS.sum((2, 3)),
    caption="Part of this edge that passes through each head.",
    x_label="head",
    y_label="layer",
    value_label="logit",
)

# %%
layer, head, query, key = map(int, np.unravel_index(abs(shares_LNTS).argmax(), shares_LNTS.shape))
print(f"most: layer {layer}, head {head}, which reads{words[key]} at{words[query]}")
report.heat_map(
    shares_LNTS[layer, head],
    caption=f"Part of the edge by query and key, layer {layer}, head {head}.",
    x_label="key",
    y_label="query",
    row_labels=words,
    column_labels=words,
    value_label="logit",
)

# %% [markdown]
# `graph.to_json("graph.json", tokenizer=model.tokenizer)` writes the graph for Neuronpedia and
# circuit-tracer; `iaj sparse graph --model=FOLDER --neurons --prompt="..."` makes a page to click
# through, with interventions that are measured.
