"""The audit of Llama-3.2-1B with the paper's settings, on a local folder of its weights.

    iaj polyattn audit --config=polyattn/llama32_1b --workdir=runs/llama32_1b

The folder `weights/llama-3.2-1b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`.

From "When Does Polynomial Attention Concentrate?" are: bfloat16, induction and MQAR at 4096
tokens, 200 prompts a cell, 14 recipes, sets of 5 to 80 heads by median S_2 at b_auto, 20 random
draws with seeds 0 to 19 (Appendix V; its figures show 5). Unlike there, needle prompts have exactly
1536 tokens, which is about what the paper's 128 distractor sentences give. Its copying suite is
`--config.suites="('copying',)"`, left out here; ours has 54 openings for its 200.

The paper finds: unsafe rows at b = 0 and p = 2, 4, 8 of 19.6, 10.3, 4.7 % (induction) and 21.4,
11.0, 4.7 % (MQAR) in Table 1; b_auto = 3.5547; 200 of 200 needles with softmax, `relu_p4_bauto` and
`relu_p8_bauto` in Table 3.
"""

from ml_collections import ConfigDict

from polyattn_jax.audit.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return experiment(
        mode,
        "weights/llama-3.2-1b",
        dtype="bfloat16",
        niah_lengths=(1536,),
        induction_length=4096,
        mqar_length=4096,
        sweep_length=1536,
        # as the paper, whose b_auto is to be compared; by default it would be the sweep's
        calibration_length=1024,
        ablation_n=200,
    )
