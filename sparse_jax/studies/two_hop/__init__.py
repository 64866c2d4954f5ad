"""Whether a cross-layer transcoder merges two hops of a computation into one, on Boolean functions.

config     settings
toy        the two-hop model and its activations
measures   the path by which a transcoder writes the second hop's result
results    typed results
study      trains transcoders of growing sparsity, and measures them
report     the page
"""
