"""Table 1 of the Prototype Transformer's paper on introductions of Wikipedia articles and a CPU.

    iaj protot study --config=protot/paper_cpu --workdir=runs/paper_cpu
    iaj protot study --config=protot/paper_cpu --workdir=runs/paper_cpu --only=protot,llama
    iaj protot study --config=protot/paper_cpu:small --workdir=runs/paper_small

The paper's protocol, 18,000 examples that are the first tokens of a document each, with half its
vocabulary, three of its ten epochs, and its learning rates (appendix A.2). Some 90 minutes of one
core a model and seed, estimated; `--only` takes some of the models in one sitting. `:small` has
half the examples, context and width, four layers and 16 prototypes: minutes a model and seed.
`:whole` has the paper's vocabulary, ten epochs and bfloat16, for a GPU.
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import Variant, cpu_study

# Model, its learning rate, the paper's perplexity at a context of 256.
MODELS = (
    ("protot", 2.0e-3, 90.5),
    ("llama", 1.6e-3, 78.7),
    ("mamba", 3.8e-3, 86.0),
    ("deltanet", 6.8e-3, 90.4),
)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(name, (f"model={name}",), (rate,), perplexity) for name, rate, perplexity in MODELS
    )
    return cpu_study(mode, *variants, table="Table 1")
