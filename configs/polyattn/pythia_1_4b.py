"""The audit of Pythia-1.4b with the paper's settings, on a local folder of its weights.

    iaj polyattn paper --config=polyattn/pythia_1_4b --workdir=runs/pythia_1_4b

The folder `weights/pythia-1.4b` holds config.json, the safetensors and tokenizer.json as Hugging
Face publishes them; `--config.model=FOLDER` names another. On eight GPUs add
`--config.mesh="(8,1,1)" --config.batch_size=8`. `iaj polyattn audit` takes the same file.

Settings are those of `polyattn/llama32_1b`, without the needles of 6,000 tokens, the pass keys and
the four keys of RULER, which the paper does not ask this model. It was trained on 2,048 tokens:
`context` lets prompts be longer, as in the paper, which calls its own 4,096 out of distribution.

The paper finds: unsafe rows at b = 0 and p = 2 of 66.0 % (induction), 61.7 % (copying) and 63.4 %
(MQAR) at 1024 tokens, 99.2, 76.9 and 95.3 % at 4096 (Table 1); b_auto = 119.75; 200 of 200 needles
with softmax, and every recipe collapses (Table 3).
"""

from ml_collections import ConfigDict

from polyattn_jax.studies.paper.settings import of_model


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return of_model(
        mode,
        "weights/pythia-1.4b",
        context=4096,
        suites=(
            "induction@256",
            "induction@1024",
            "induction@4096",
            "mqar@1024",
            "copying@4096",
            "copying@1024",
            "copying@500",
            "two_needles@400",
            "decoys@1500",
            "ruler_paper_single@4000",
        ),
    )
