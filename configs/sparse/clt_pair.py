"""Cross-layer transcoders of the pair's dense, control and sparse decoder, on two CPU cores.

    iaj sparse transcoder --config=sparse/clt_pair --config.model=runs/pair/dense/model \\
        --workdir=runs/clt_pair/dense
    iaj sparse transcoder --config=sparse/clt_pair \\
        --config.model=runs/pair/sparse/seed_0/control/model --workdir=runs/clt_pair/control
    iaj sparse transcoder --config=sparse/clt_pair \\
        --config.model=runs/pair/sparse/seed_0/target_NATS/model --workdir=runs/clt_pair/sparse

All three read the text of `iaj sparse pair --config=sparse/pair --workdir=runs/pair`, a third of
whose documents are prompts of the circuit tasks: on such prompts a transcoder of plain text has
some ten times as many active features a token. Of a pair in another folder, add its text:

    --config.corpus.source=PAIR/text/pretrain.jsonl

Four layers of 2,048 features on 1.7 million tokens: 7.3 million parameters for layers of width 256,
1.9 million for those of `models/pair_192`. On its sparse model this took 53 minutes on one busy
core, and 39 more for the control, a per-layer transcoder of as many parameters, which
`--noconfig.control` omits.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from sparse_jax.studies.transcoders import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.settings.TranscoderTraining`."""
    return STUDY.settings(
        mode,
        corpus=CorpusConfig("runs/pair/text/pretrain.jsonl", "document", splits=(0.97, 0.03, 0.0)),
        features=2_048,
        batch_size=16,
        steps=2_000,
        eval_every=200,
        scores_every=200,
        score_prompts=16,
        control=True,
    )
