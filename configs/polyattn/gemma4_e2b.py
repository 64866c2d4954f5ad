"""The audit of Gemma-4-E2B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/gemma4_e2b --workdir=runs/gemma4_e2b

The folder `weights/gemma-4-e2b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

Its text decoder is read, with the settings of `polyattn/llama32_1b`. Most layers see a window of
keys: `rows.parquet` holds each row's window. The paper finds: unsafe rows at b = 0 and p = 2 of
71.3 % (induction), 96.1 % (copying) and 90.6 % (MQAR) in Table 1; b_auto = 1.9258; 200 of 200
needles with softmax and `relu_p8_bauto` (Table 3).
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(mode, "weights/gemma-4-e2b")
