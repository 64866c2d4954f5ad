"""The shapes of Table 13 of the Prototype Transformer's paper: parameters and FLOPs of its models.

    iaj protot count --config=protot/throughput

`:billion` has a ProtoT and a LLaMA of about a billion parameters, in a context of 1,024 tokens, and
is not of the paper.

It should print the paper's parameters exactly (ProtoT 12,205,266; LLaMA 12,938,496; DeltaNet
12,963,456; Mamba, alone with a tied embedding, 6,724,352) and its forward FLOPs of one sample of
256 tokens to half a percent (4.1583e9; 4.9342e9; none; 3.4735e9). The table calls them forward and
backward. `mamba_ffn` is not in the paper: Mamba with an MLP that matches it to ProtoT.
"""

from ml_collections import ConfigDict


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.count.CountConfig`."""
    if mode not in ("", "smoke", "billion"):
        raise ValueError(f"there is no mode {mode!r}; there are 'smoke' and 'billion'")
    config = ConfigDict(
        {
            "hidden_size": 256,
            "num_layers": 6,
            "vocab_size": 16_000,
            "context": 256,
            "models": ("protot", "llama", "deltanet", "mamba", "mamba_ffn"),
            "tied": ("mamba",),
        }
    )
    if mode == "billion":
        config.update(
            {
                "hidden_size": 2_048,
                "num_layers": 20,
                "vocab_size": 32_000,
                "context": 1_024,
                "models": ("protot", "llama"),
                "tied": (),
            }
        )
    if mode == "smoke":
        config.update({"hidden_size": 32, "num_layers": 2, "vocab_size": 500, "context": 32})
    return config
