"""The audit of Llama-3-8B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/llama3_8b --workdir=runs/llama3_8b

The folder `weights/llama-3-8b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

The paper has its numbers in Tables 24 and 29: needles alone, with b_auto = 4.50, and 200 of 200 of
them with softmax, `relu_p4_bauto` and `relu_p8_bauto`. Other suites and the ablation are left out.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(
        mode,
        "weights/llama-3-8b",
        niah_lengths=(1500,),
        induction_n=0,
        mqar_n=0,
        suites=(),
        suite_recipes=(),
        ablation_heads=(),
        ablation_suites=(),
        single_heads=0,
    )
