"""Table 1 of the Prototype Transformer's paper: four models at four contexts.

    iaj protot study --config=protot/long_context --workdir=runs/contexts

The best learning rates of the paper's search, at every context. Further modes:

    :scaled        that rate, and it times the root of the context over 256: the paper tried both
                   and reports the better (A.2)
    :grid          half, one and two times that rate, which for ProtoT are the released
                   configuration's 1e-3, 2e-3 and 4e-3
    :unscheduled   without warm-up and decay of the rate, as the released configuration of this
                   study alone

`--config.base.arithmetic=released` trains ProtoT with the released prefix mean.

The default corpus, introductions of Wikipedia articles, has few documents that fill a context: 13 %
have more than 256 tokens, under 1 % more than 512. So compare contexts on longer documents,
`--config.base.corpus.source=fineweb_edu.parquet`.
"""

from collections.abc import Callable, Iterator
import math

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

CONTEXTS = (256, 512, 1024, 2048)
# Test perplexity by context; the learning rates are the best of the paper's search.
PAPER = {
    "protot": (2.0e-3, (90.5, 84.8, 80.5, 81.9)),
    "llama": (1.6e-3, (78.7, 70.4, 65.3, 63.6)),
    "mamba": (3.8e-3, (86.0, 78.0, 70.5, 69.5)),
    "deltanet": (6.8e-3, (90.4, 76.3, 70.6, 68.9)),
}


def variants(
    factors: Callable[[int], tuple[float, ...]] = lambda _: (), changes: tuple[str, ...] = ()
) -> Iterator[Variant]:
    """The rows, at the factors of a context on a model's rate; without factors at that alone."""
    for model, (rate, perplexities) in PAPER.items():
        for context, perplexity in zip(CONTEXTS, perplexities, strict=True):
            yield Variant(
                f"{model}_{context}",
                (f"model={model}", f"learning_rate={rate}", f"context={context}", *changes),
                tuple(rate * factor for factor in factors(context)),
                paper=perplexity,
            )


def scaled(context: int) -> tuple[float, ...]:
    """The rate itself and, at a longer context, its scaled value."""
    return (1.0,) if context == CONTEXTS[0] else (1.0, math.sqrt(context / CONTEXTS[0]))


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    return study(
        mode,
        *variants(),
        other={
            "scaled": variants(scaled),
            "grid": variants(lambda _: (0.5, 1.0, 2.0)),
            "unscheduled": variants(changes=("schedule=constant", "warmup=0.0")),
        },
        table="Table 1",
        paper_split="test",
        **PAPER_PROTOCOL,
    )
