"""The audit of Llama-3.2-1B with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/llama32_1b --workdir=runs/llama32_1b

The folder `weights/llama-3.2-1b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

From "When Does Polynomial Attention Concentrate?" are the suites at its lengths
(`published/polyattn.toml`, `asked`), bfloat16, 200 prompts a cell, 14 recipes and relu^4 at biases
of 1 to 6, sets of 5 to 80 heads by median S_2 at b_auto, and 20 random draws with seeds 0 to 19
(Appendix V; its figures show 5). Unlike there, a prompt has exactly so many tokens, and copying 54
openings for its 200.

The paper finds: unsafe rows at b = 0 and p = 2, 4, 8 of 19.6, 10.3, 4.7 % (induction) and 21.4,
11.0, 4.7 % (MQAR) in Table 1; b_auto = 3.5547; 200 of 200 needles with softmax, `relu_p4_bauto` and
`relu_p8_bauto` in Table 3.
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(mode, "weights/llama-3.2-1b")
