"""Post-training of a pretrained language model to sparse attention at equal loss.

After "Sparse Attention Post-Training for Mechanistic Interpretability".

    attend        Bernoulli gates on every edge of a decoder's attention (Eq. 1 to 3)
    geco          a penalty whose strength keeps the loss at its target (Eq. 4, 5 and 7)
    objective     both, with adapters and a teacher, as an objective of the shared training loop
    posttrain     command: from a pretrained model to a sparse one
    evaluation    dense and sparse model on the same tokens, with intervals
    results       the dataclasses of all JSON results
    report        the page of a post-training
    model         loading and saving a sparse model
    open_edges    its open attention edges as a table; drawn by edge_graph
    multiple_choice    command: dense and sparse models on the same questions
    addition      command: two-digit sums by a dense and a sparse toy model
    pair          command: a dense model, its control and its sparse version, on one kind of text
    circuits      command: heads and edges that explain a task, in dense and sparse models
    transcoders   command: sparse features that stand for MLPs
    graphs        attribution graphs between such features, with heads that carry their edges
"""

from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.model import SparseModel, load

__all__ = ["SparseModel", "by_kernels", "gated", "load"]
