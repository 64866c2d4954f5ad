"""The audit of Pythia-1.4b with the paper's settings, on a local folder of its weights.

    iaj polyattn audit --config=polyattn/pythia_1_4b --workdir=runs/pythia_1_4b

The folder `weights/pythia-1.4b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`.

From "When Does Polynomial Attention Concentrate?" are: bfloat16, 200 prompts a cell, 14 recipes,
sets of 5 to 80 heads by median S_2 at b_auto, 20 random draws with seeds 0 to 19 (Appendix V; its
figures show 5). Unlike there, induction and MQAR have 2048 tokens: the model was trained on no
more, the paper calls its own 4096 out of distribution, and the prompt audit refuses what is longer
than the context. Needle prompts have exactly 1536 tokens, about what the paper's 128 distractor
sentences give. Its copying suite is `--config.suites="('copying',)"`, left out here; ours has 54
openings for its 200.

The paper finds: unsafe rows at b = 0 and p = 2 of 66.0 % (induction) and 63.4 % (MQAR) at 1024
tokens, 99.2 and 95.3 % at 4096 (Table 1); b_auto = 119.75; 200 of 200 needles with softmax, and
every recipe collapses (Table 3).
"""

from ml_collections import ConfigDict

from polyattn_jax.audit.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return experiment(
        mode,
        "weights/pythia-1.4b",
        dtype="bfloat16",
        niah_lengths=(1536,),
        induction_length=2048,
        mqar_length=2048,
        sweep_length=1536,
        # as the paper, whose b_auto is to be compared; by default it would be the sweep's
        calibration_length=1024,
        ablation_n=200,
    )
