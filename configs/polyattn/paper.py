"""Every table and figure of the polynomial-attention paper that an audit can measure, on any model.

    iaj polyattn paper --config=polyattn/paper --models=smollm2,gemma3_270m --workdir=runs/paper

After "When Does Polynomial Attention Concentrate?": 200 prompts a cell, needles of about 1,500
tokens, induction and MQAR at 4,096, b_auto of 1,024 tokens, its 14 recipes and relu^4 at biases of
1 to 6, sets of 5 to 80 heads with 20 random draws, its harder needles and literary openings. Unlike
there, harder needles have at most 1,536 tokens, openings are 54 for 200, and weights are float32
unless `--config.dtype=bfloat16` is given. In full it is a run for a GPU. Modes: `:quickstart` has
20 prompts a cell, 10 of each harder suite, at 256 and 512 tokens, and takes two CPU cores an hour
or so for a model of 135 M parameters; `:smoke` only shows that everything runs.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from polyattn_jax.audit.config import experiment
from polyattn_jax.recipes.row_maps import RECIPES

SUITES = (
    *("induction", "copying", "needle", "two_needles", "decoys", "pass_key"),
    *("ruler_paper_single", "ruler_paper_multi"),
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "niah_lengths": (1536,),
        "sweep_length": 1536,
        "induction_length": 4096,
        "mqar_length": 4096,
        "recipes": (*RECIPES, *(f"relu:p=4,b={bias}" for bias in range(1, 7))),
        "suites": SUITES,
        "suite_recipes": tuple(RECIPES),
        # The ablation on literary openings is at the last.
        "suite_lengths": (1536, 1024, 256, 512),
        "suite_n": 200,
        "ablation_n": 200,
        "ablation_suites": ("copying",),
        "single_heads": 20,
    },
    "quickstart": {
        "niah_lengths": (256,),
        "sweep_length": 256,
        "induction_length": 512,
        "mqar_length": 512,
        "recipes": (*RECIPES, "relu:p=4,b=1", "relu:p=4,b=3"),
        "suites": SUITES,
        "suite_recipes": tuple(RECIPES),
        "suite_lengths": (256, 512),
        "suite_n": 10,
        "ablation_heads": (20, 40, 80),
        "ablation_draws": 20,
        "ablation_suites": ("copying",),
        "single_heads": 10,
    },
    "smoke": {
        "recipes": ("relu_p4_bauto", "relu_p2_b0", "relu_p1_over_L", "relu:p=4,b=1"),
        "suites": ("induction", "two_needles"),
        "suite_lengths": (64, 96),
        "calibration_length": 64,
        "single_heads": 1,
    },
}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`, with no model."""
    config = experiment(mode, "", calibration_length=1024)
    config.update(SETTINGS[mode])
    return config
