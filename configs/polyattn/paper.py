"""Every table and figure of the polynomial-attention paper that an audit can measure, on any model.

    iaj polyattn paper --config=polyattn/paper --models=smollm2,gemma3_270m --workdir=runs/paper

After "When Does Polynomial Attention Concentrate?": 200 prompts a cell, needles of about 1,500
tokens, induction and MQAR at 4,096, b_auto of 1,024 tokens, its 14 recipes and relu^4 at biases of
1 to 6, sets of 5 to 80 heads with 20 random draws, its harder needles and literary openings, each
at its length. Unlike there, openings are 54 for 200, and weights are float32 unless
`--config.dtype=bfloat16` is given. The paper's own models have files of their own, such as
`polyattn/llama32_1b`, which name the model too. In full it is a run for a GPU. Modes:
`:quickstart` has 20 prompts a cell, 10 of each harder suite, at 256 and 512 tokens, and takes two
CPU cores an hour or so for a model of 135 M parameters; `:smoke` only shows that everything runs.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper import STUDY
from polyattn_jax.studies.paper.settings import FULL


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.studies.paper.settings.PaperConfig`."""
    return STUDY.settings(mode, **FULL)
