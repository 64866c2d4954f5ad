"""ProtoT at the paper's large size: width 512, 12 layers, context 512.

    iaj protot pretrain --config=protot/large_scale --workdir=runs/large \\
        --config.corpus.source=fineweb_edu.parquet

The paper's test perplexities on FineWeb-Edu (Table 1, 339,000 examples): ProtoT 29.5, LLaMA 25.8,
Mamba 26.5 (at a rate of 2.3e-3), DeltaNet 31.5; modes `:llama`, `:mamba` and `:deltanet` train
these. The default corpus, introductions of Wikipedia articles, is smaller; `iaj protot subset`
takes the paper's numbers of documents from files of FineWeb-Edu.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.training.config import experiment

RATES = {"llama": 1.6e-3, "mamba": 2.3e-3, "deltanet": 6.8e-3}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(
        mode,
        rates=RATES,
        hidden_size=512,
        num_layers=12,
        context=512,
        corpus=CorpusConfig(source="wiki", unit="document"),
    )
