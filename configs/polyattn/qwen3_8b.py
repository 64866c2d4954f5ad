"""The audit of Qwen3-8B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/qwen3_8b --workdir=runs/qwen3_8b

The folder `weights/qwen3-8b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

The paper has no more of it than Table 18: unsafe rows at 4,096 tokens, b = 0 and p = 2 of 95.9 %
(induction), 97.9 % (copying) and 95.3 % (MQAR), and no recipe was tried. The needles of 1,500
tokens are the control that every audit has.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(
        mode,
        "weights/qwen3-8b",
        recipes=(),
        niah_lengths=(1500,),
        suites=("copying@4096",),
        suite_recipes=(),
        ablation_heads=(),
        ablation_suites=(),
        single_heads=0,
    )
