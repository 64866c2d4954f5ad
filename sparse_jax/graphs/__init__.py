"""Attribution graphs: which features, errors and tokens cause features and logits of a prompt.

attribute      the graph of a prompt, in a model whose MLPs a transcoder replaces
graph          nodes, adjacency matrix, certificates
replacement    what a forward pass freezes
basis          what a graph needs of the features that stand for MLPs
linear         linear passes through the frozen model, up and down
mediation      heads and key-query pairs that carry an edge, exactly
qk             why a head looked there: attention scores by pairs of sources
rows           rows of the adjacency matrix in chunks
neurons        graphs of the MLPs' own neurons, without a transcoder
neuron_rows    rows with every neuron of a prompt, of which the largest entries are kept
effects        effects of interventions, predicted and measured
interventions  interventions in the model against what a graph predicts
groups         interventions on groups of sources, such as supernodes, and their scores
influence      influence on the logits, pruning, scores
paths          the strongest path from a token to a logit
graph_document pruned graphs as files hold them
graph_json     files in the schema of Neuronpedia and circuit-tracer
supernodes     groups of features, proposed by clustering
"""

from sparse_jax.graphs.attribute import attribute
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.groups import scale_groups, score_groups

__all__ = ["Graph", "attribute", "scale_groups", "score_groups"]
