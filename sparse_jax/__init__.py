"""Makes the attention of a pretrained language model sparse at equal loss, and reads the result.

After "Sparse Attention Post-Training for Mechanistic Interpretability".

    attend        Bernoulli gates on every edge of a decoder's attention (Eq. 1 to 3)
    geco          a penalty whose strength keeps the loss at its target (Eq. 4, 5 and 7)
    objective     the two, adapters and a teacher as an objective of the shared training loop
    posttrain     from a pretrained model to a sparse one: a command
    evaluation    dense and sparse on the same tokens, with intervals
    model         a sparse model on disk
    addition      two-digit sums by a dense and a sparse toy model: a command

Not yet implemented: circuits, transcoders, attribution graphs.
"""

from sparse_jax.attend import by_kernels, gated
from sparse_jax.model import SparseModel, load

__all__ = ["SparseModel", "by_kernels", "gated", "load"]
