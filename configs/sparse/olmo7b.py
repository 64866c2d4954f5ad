"""OLMo 7B with adapters on a node of eight GPUs, as in Table 2 of the paper.

    iaj sparse posttrain --config=sparse/olmo7b --workdir=runs/sparse_olmo \\
        --config.model=/path/to/OLMo-7B-hf --config.corpus.source=/path/to/dolma

Neither the weights nor Dolma are in a package registry: give local folders. The paper gets from
2.24 to 2.287 nats per token with 0.44 % of edges open, in about 14 days. Its batch of 16 in four
accumulation steps is 64 windows an update (docs/sparse/gates.md explains Table 2): 13.1 billion
tokens in total. Its "fc_in, fc_out" are all three matrices of the gated MLP here. It was not run.

Gates start open. `:paper` has the gates of the paper, q.k without its scale and bias 0, which close
edges that the model needs before its first update.
"""

import dataclasses

from ml_collections import ConfigDict

from lm_jax.model.lora import LoraConfig
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.gates.geco import Strength
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import OPEN_GATES, PAPER_GATES


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    paper = {"paper": lambda open_gates: dataclasses.replace(open_gates, **PAPER_GATES)}
    study = dataclasses.replace(STUDY, modes=paper | STUDY.modes)
    return study.settings(
        mode,
        model="OLMo-7B-hf",
        corpus=CorpusConfig("dolma", "document", splits=(0.9999, 0.0001, 0.0)),
        context=512,
        validation_documents=1_000,
        # The dense model reaches 2.24.
        targets=(2.29,),
        strength=Strength(dual_rate=0.01),
        adapters=LoraConfig(
            rank=400, alpha=800.0, targets=("q", "k", "v", "o", "gate", "up", "down")
        ),
        batch_size=64,
        **OPEN_GATES,
        accumulate=4,
        steps=400_000,
        learning_rate=1e-5,
        warmup=1_000 / 400_000,
        weight_decay=0.1,
        dtype="bfloat16",
        remat=True,
        eval_every=2_000,
        save_every=1_000,
        mesh=(1, 8, 1),
    )
