"""Two-digit addition by a dense and a sparse toy model, with graphs of their attention edges.

The toy study of "Sparse Attention Post-Training" (Fig. 1, Fig. 9, Appendix A): how much of a simple
algorithm can be read off the open attention edges of a model?

    problems           the ten thousand sums as tokens, their carries, and the split
    config             the settings
    models             the decoder, the two objectives, and training
    attention_trace    one forward pass over held-out sums: answers and every attention weight
    measures           exact sums, edges per sum, and attention to operands and carries
    results            the dataclasses of `summary.json`
    graph              the attention graph of one sum, as SVG
    report             the page

`python -m sparse_jax.studies.addition` runs it all.
"""
