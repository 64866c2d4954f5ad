"""SmolLM2-135M with adapters, under a bound over its control, within an hour on two CPU cores.

    iaj sparse posttrain --config=sparse/posttrain --workdir=runs/sparse

The control, the same training with every gate open, comes first: at each update the sparse model
may lose 0.08 nats per token more than it on the same batch (introductions of Wikipedia articles).
`--config.seeds="(0, 1, 2)"` trains three seeds. `smollm2_256.py` has a longer context, and bounds
over the pretrained model.

`:over_dense` bounds the loss by that of the pretrained model, with scaled gates that are sampled to
the end. `:divergence` bounds the divergence from the pretrained model in place of the loss, without
a control. `:paper_gates` has the gates of the paper, q.k without its scale and bias 0, which break
this model before its first update; in all others they start open.
"""

from collections.abc import Callable
import dataclasses

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import (
    ON_DIVERGENCE,
    OVER_CONTROL,
    PAPER_GATES,
    SMALL_MODEL,
    PosttrainConfig,
)


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    settings = {
        **SMALL_MODEL,
        "corpus": CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=600_000),
        "validation_documents": 120,
    }
    over_control = settings | OVER_CONTROL | {"slacks": (0.08,)}
    recipes = {
        "over_dense": settings | {"control": True},
        "divergence": settings | ON_DIVERGENCE,
        "paper_gates": over_control | PAPER_GATES,
    }
    modes = {name: _mode(PosttrainConfig(**recipe)) for name, recipe in recipes.items()}
    study = dataclasses.replace(STUDY, modes=modes | STUDY.modes)
    return study.settings(mode, **over_control | {"raw_gate": False})


def _mode(recipe: PosttrainConfig) -> Callable[[PosttrainConfig], PosttrainConfig]:
    return lambda _: recipe
