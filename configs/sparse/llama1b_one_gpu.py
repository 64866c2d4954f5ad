"""Llama 3.2 1B with adapters on one GPU: the paper's OLMo recipe, scaled down.

    iaj sparse posttrain --config=sparse/llama1b_one_gpu \\
        --workdir=runs/sparse_llama --config.model=/path/to/Llama-3.2-1B

Its weights are in no package registry: give a local folder. The adapters have the paper's ratio of
alpha to rank at a sixth of its rank, and the run trains on a hundredth of its tokens. Goal: at most
2 % of edges open, within 0.05 nats per token of the dense model. It was not run.
"""

from ml_collections import ConfigDict

from lm_jax.model.lora import LoraConfig
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import OPEN_GATES


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    return STUDY.settings(
        mode,
        model="Llama-3.2-1B",
        context=512,
        adapters=LoraConfig(rank=64, alpha=128.0),
        batch_size=16,
        **OPEN_GATES,
        accumulate=4,
        steps=4_000,
        dtype="bfloat16",
        remat=True,
        eval_every=250,
        save_every=250,
    )
