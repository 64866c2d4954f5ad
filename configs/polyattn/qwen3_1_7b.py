"""The audit of Qwen3-1.7B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/qwen3_1_7b --workdir=runs/qwen3_1_7b

The folder `weights/qwen3-1.7b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

Settings are those of `polyattn/llama32_1b`, without the four keys of RULER, which Table 32 does not
have of this model. The paper finds: unsafe rows at b = 0 and p = 2 of 94.0 % (induction), 96.7 %
(copying) and 93.9 % (MQAR) in Table 1; b_auto = -3.3594; 200 of 200 needles with softmax, and at
best 99 of 200 with a recipe (`relu_p16_b0`, Table 3).
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(
        mode,
        "weights/qwen3-1.7b",
        suites=(
            "induction@256",
            "induction@1024",
            "induction@4096",
            "copying@4096",
            "copying@500",
            "needle@6000",
            "two_needles@400",
            "decoys@1500",
            "pass_key@1500",
            "ruler_paper_single@4000",
        ),
    )
