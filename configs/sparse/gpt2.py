"""GPT-2 small with all weights trained, as in Table 2 of the paper.

    iaj sparse posttrain --config=sparse/gpt2 --workdir=runs/sparse_gpt2 \\
        --config.model=/path/to/gpt2 --config.corpus.source=/path/to/openwebtext

Neither the weights nor OpenWebText are in a package registry: give local folders. The paper gets
from 3.48 to 3.501 nats per token with 0.22 % of edges open, on one H100 in about 14 days. Its batch
of 256 in four accumulation steps is 1,024 windows an update (docs/sparse/gates.md explains
Table 2): 78.6 billion tokens in total. It was not run.

Gates start open. `:paper` has the gates of the paper, q.k without its scale and bias 0, which close
edges that the model needs before its first update.
"""

import dataclasses

from ml_collections import ConfigDict

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
        model="gpt2",
        corpus=CorpusConfig("openwebtext", "document", splits=(0.999, 0.001, 0.0)),
        context=64,
        validation_documents=2_000,
        # The dense model reaches 3.48.
        targets=(3.5,),
        strength=Strength(dual_rate=0.1),
        full=True,
        **OPEN_GATES,
        batch_size=1_024,
        accumulate=4,
        steps=1_200_000,
        learning_rate=1e-5,
        warmup=1_000 / 1_200_000,
        weight_decay=0.1,
        dtype="bfloat16",
        eval_every=5_000,
        save_every=2_500,
    )
