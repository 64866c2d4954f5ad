# %% [markdown]
# # A sparse model in torch
#
# `pair_192_sparse`, which comes with the package, as a model of transformers whose attention has
# the gates of its post-training. Needs `pip install torch`; a folder that `iaj sparse posttrain`
# exported does as well as the name.

# %%
import torch
from transformers import AutoTokenizer

from lm_jax.assets import published
from sparse_jax import torch_gates

model, gates = torch_gates.load("pair_192_sparse")
tokenizer = AutoTokenizer.from_pretrained(published.folder("pair_192_sparse"))
given = tokenizer("Then, Mary and John went to the park. John gave a book to", return_tensors="pt")

# %% [markdown]
# A hook of torch on the attention of layer 2 keeps its pattern, in which closed edges are 0; the
# gates count the open ones of the pass by layer, row and head.

# %%
patterns = []
hook = model.model.layers[2].self_attn.register_forward_hook(
    lambda module, arguments, output: patterns.append(output[1])
)
with torch.no_grad():
    logits = model(given.input_ids, attention_mask=given.attention_mask).logits
hook.remove()

open_LN = gates.open_edges_LBN[:, 0]
pairs = int(gates.pairs_LB[0, 0])
print(f"open edges of {pairs} by layer (rows) and head:\n{open_LN}")
assert torch.equal((patterns[0][0] > 0).sum((1, 2)), open_LN[2])

# %%
print(repr(tokenizer.decode(logits[0, -1].argmax())))
assert open_LN.sum() < 0.3 * pairs * open_LN.numel()
