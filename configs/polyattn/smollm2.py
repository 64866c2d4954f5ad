"""The audit of SmolLM2-135M-Instruct, real weights from the manifest.

    python -m polyattn_jax.audit --config=configs/polyattn/smollm2.py --workdir=runs/smollm2

Modes: `:quickstart` ends within eight minutes on two CPU cores, `:smoke` within one. The numbers
that were reached are in docs/polyattn.md.
"""

from ml_collections import ConfigDict

from polyattn_jax.row_maps import RECIPES


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.config.AuditConfig`."""
    config = ConfigDict(
        {
            "model": "smollm2",
            "dtype": "float32",
            "mesh": (1, 1, 1),
            "seed": 0,
            "batch_size": 2,
            "haystack": "essays",
            "niah_lengths": (256, 512, 1024),
            "niah_n": 200,
            "control_n": 50,
            "induction_length": 1024,
            "induction_n": 200,
            "mqar_length": 1024,
            "mqar_n": 200,
            "repeated_n": 20,
            "repeated_vocabulary": 12_000,
            "calibration_length": 1024,
            "budget": 0.05,
            "recipes": tuple(RECIPES),
            "sweep_length": 512,
            "ablation_recipe": "relu_p2_bauto",
            "ablation_heads": (5, 10, 20, 40, 80),
            "ablation_draws": 5,
            "ablation_n": 100,
            "top_heads": 40,
            "tolerance": 0.05,
            "resamples": 1000,
        }
    )
    if mode in ("quickstart", "smoke"):
        config.update(
            {
                "batch_size": 1,
                "niah_lengths": (256, 512),
                "niah_n": 10,
                "control_n": 10,
                "induction_length": 256,
                "induction_n": 10,
                "mqar_length": 256,
                "mqar_n": 10,
                "repeated_n": 4,
                "sweep_length": 256,
                "ablation_heads": (20, 80),
                "ablation_draws": 1,
                "ablation_n": 10,
            }
        )
    if mode == "smoke":
        config.update(
            {
                "niah_lengths": (64,),
                "niah_n": 2,
                "control_n": 2,
                "induction_length": 64,
                "induction_n": 2,
                "mqar_length": 64,
                "mqar_n": 2,
                "repeated_n": 1,
                "calibration_length": 64,
                "recipes": ("relu_p4_bauto",),
                "sweep_length": 64,
                "ablation_heads": (20,),
                "ablation_n": 2,
                "resamples": 100,
            }
        )
    return config
