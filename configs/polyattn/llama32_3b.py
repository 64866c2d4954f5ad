"""The audit of Llama-3.2-3B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/llama32_3b --workdir=runs/llama32_3b

The folder `weights/llama-3.2-3b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

The paper has Tables 23 to 25 of it, and its line of Table 29: unsafe rows at 4,096 tokens, b = 0
and p = 2 of 19.4 % (induction), 30.5 % (copying) and 20.6 % (MQAR); b_auto = 4.50; 200 of 200
needles with softmax, `relu_p4_bauto` and `relu_p8_bauto`; no change on needles or literary openings
by the top or the bottom 5 to 80 heads. Of recipes, its openings are asked under that of the
ablation alone.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(
        mode,
        "weights/llama-3.2-3b",
        niah_lengths=(1500,),
        suites=("copying@4096", "copying@500"),
        suite_recipes=("relu_p2_bauto",),
        single_heads=0,
    )
