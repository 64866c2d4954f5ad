"""Post-training of a pretrained language model to sparse attention at equal loss.

After "Sparse Attention Post-Training for Mechanistic Interpretability".

    gates          Bernoulli gates on every edge (Eq. 1 to 3), GECO (Eq. 4, 5 and 7), SparseModel
    circuits       tasks, patching, ablations and component edges, in dense and sparse models
    transcoders    sparse features that stand for MLPs
    graphs         attribution graphs between such features, with heads that carry their edges
    studies        commands: posttrain, pair, circuits, transcoder, graph and others
"""

from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.model import SparseModel, load

__all__ = ["SparseModel", "by_kernels", "gated", "load"]
