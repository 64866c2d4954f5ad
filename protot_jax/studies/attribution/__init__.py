"""Logits attributed to prototypes: which prototype carried what from which token to which.

    from protot_jax import load_run
    from protot_jax.studies import attribution

    model = load_run("runs/speeches")
    tokens = attribution.prompt_tokens(model.tokenizer, "the people of the united")
    result = attribution.attribute(model, tokens, targets=[412])
    result.through_XLNTS[0, 2, 5]      # of prototype 5 in layer 2, query by key position

The command is `iaj protot graph`.
"""

from protot_jax.analysis.token_ids import prompt_tokens
from protot_jax.studies.attribution.decomposition import Decomposition, attribute

__all__ = ["Decomposition", "attribute", "prompt_tokens"]
