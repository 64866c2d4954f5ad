"""The search of the Prototype Transformer's paper: learning rate and batch size (section 4, A.2).

    iaj protot search --config=protot/search --workdir=runs/search

50 trials of three seeds each, on 18,000 introductions of Wikipedia articles: days on two cores,
hours on a GPU. `--config.sampler=tpe` does without torch. The paper found a batch size of 32 and
rates of 2.0e-3 (ProtoT), 1.6e-3 (LLaMA), 3.8e-3 (Mamba) and 6.8e-3 (DeltaNet), on 18,000 examples
of FineWeb-Edu and ten epochs. Sizes can be searched as well, within a limit of forward FLOPs an
example:

    --config.choices="('hidden_size=[128,256,384]','num_layers=[4,6,8]')" --config.most_flops=4.2e9
"""

from ml_collections import ConfigDict

from protot_jax.training.config import PretrainConfig
from protot_jax.training.search_space import search
from protot_jax.training.study_config import PAPER_PROTOCOL


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.search_space.SearchConfig`."""
    return search(mode, base=PretrainConfig(**PAPER_PROTOCOL))
