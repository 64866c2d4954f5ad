"""Two-digit addition by two small models, one dense and one sparse, drawn edge by edge.

The toy study of "Sparse Attention Post-Training" (Fig. 1, Fig. 9, Appendix A): how far can the
attention of a model be read off its open edges, when the task is one that everybody can do?

    problems    the ten thousand sums as tokens, their carries, and the split
    config      the settings
    models      the decoder and the two objectives; training them
    looking     one pass over held-out sums: answers, and every attention weight
    measures    exact sums, edges per sum, and how often digits and carries are attended to
    graph       the layer graph of one sum, as SVG
    report      the page

`python -m sparse_jax.addition` runs it all.
"""
