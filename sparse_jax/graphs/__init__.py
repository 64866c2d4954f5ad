"""Attribution graphs: which features, errors and tokens cause features and logits of a prompt.

attribute      the graph of a prompt, in a model whose MLPs a transcoder replaces
graph          nodes, adjacency matrix, certificates
replacement    what a forward pass freezes
linear         linear passes through the frozen model, up and down
mediation      heads and key-query pairs that carry an edge, exactly
influence      influence on the logits, pruning, scores
graph_json     files in the schema of Neuronpedia and circuit-tracer
supernodes     groups of features, proposed by clustering
page           the offline page of a graph, with a viewer
"""

from sparse_jax.graphs.attribute import attribute
from sparse_jax.graphs.graph import Graph

__all__ = ["Graph", "attribute"]
