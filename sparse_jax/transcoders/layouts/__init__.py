"""Public layouts of transcoders: one module each, a table of names and what they mean.

folders          which layout a folder has
tensors          files of tensors, strictly: every one is read, and none is left over
layer            one layer in one form, and layers put together
circuit_tracer   cross-layer transcoders and sets of per-layer ones
gemma_scope      Gemma Scope 1 and 2
saelens          SAELens 6 and before
sparsify         sparsify
clt_forge        CLT-Forge
dictionary_learning    autoencoders of dictionary_learning
"""
