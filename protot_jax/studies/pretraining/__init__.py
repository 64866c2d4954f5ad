"""Pretrains ProtoT, or a baseline of the same shape, on real text.

    iaj protot pretrain --config=protot/quickstart --workdir=runs/speeches
    iaj protot pretrain --config=protot/default --config.model=llama --workdir=runs/llama

1. The corpus is read, tokenized and split once (`lm_jax.text.preparation`); `iaj fetch sotu` brings
   that of the quickstart.
2. Each seed trains in its own folder, from its last checkpoint if there is one.
3. The weights of lowest validation perplexity and the last weights are evaluated on validation and
   test text. Perplexity is weighted by token; the unigram model's perplexity on the same tokens is
   printed with it.

Besides what every study has, the work folder holds

    data/                  the prepared corpus
    seed_<n>/              checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    README.md              the model card

The same command resumes a killed run, which ends with the same parameters.
"""

from lm_jax.study import Study
from protot_jax.studies.pretraining.results import PretrainSummary
from protot_jax.studies.pretraining.settings import PretrainSettings
from protot_jax.training.config import smoke

STUDY = Study(
    command="protot pretrain",
    config=PretrainSettings,
    modes={"smoke": smoke},
    summary=PretrainSummary,
)
