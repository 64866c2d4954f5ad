"""The gates of an exported sparse model in torch, as an attention function of transformers.

    torch_gates.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sparse_gates")
    gates = torch_gates.load_gates(model)

or `model, gates = torch_gates.load("pair_192_sparse")`, which is the three lines in one. Then the
model computes what `sparse_jax.load(folder).forward` does. With scores s = scale q.k, capped where
the family caps them, and the bias of each head,

1. e = s + bias, or q.k + bias with a raw gate; a gate is open where e > 0;
2. the pattern is the softmax of s over all visible keys, times the gates, and only with
   `renormalise` divided by its sum;
3. a query that is padding sees nothing, and is not counted.

All of it is float32 (float64 in a model of float64), whatever the weights are. Gates pass no
gradient on: the derivative is that of the function that was computed. Libraries that call the model
of transformers, such as nnsight, need nothing else; a bridge of TransformerLens computes attention
itself, and `add_to_bridge` hooks the gates in.

torch is imported inside of functions alone, so that `sparse_jax` runs without it.
"""

from sparse_jax.torch_gates.attention import register
from sparse_jax.torch_gates.bridge import add_to_bridge
from sparse_jax.torch_gates.gates import NAME, TorchGates
from sparse_jax.torch_gates.load import load, load_gates

__all__ = ["NAME", "TorchGates", "add_to_bridge", "load", "load_gates", "register"]
