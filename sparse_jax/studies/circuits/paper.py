"""Published circuits of "Sparse Attention Post-Training for Mechanistic Interpretability".

Ratios at 90 % of the logit difference, as printed in Figs 3, 4, 5, 13 and 14. Our long IOI prompts
have other wordings than the paper's, so that their ratio is not put beside it (`OTHER_WORDINGS`).
"""

import dataclasses

from lm_jax.assets import papers


@dataclasses.dataclass(frozen=True)
class PublishedRatio:
    """Components of the dense model's circuit over those of the sparse model's."""

    task: str
    model: str
    component: str
    scope: str
    ratio: float
    figure: int


@dataclasses.dataclass(frozen=True)
class _Numbers:
    circuit_ratios: tuple[PublishedRatio, ...]
    other_wordings: tuple[str, ...]


_NUMBERS = papers.numbers("sparse", _Numbers)
RATIOS, OTHER_WORDINGS = _NUMBERS.circuit_ratios, _NUMBERS.other_wordings


def published(task: str, component: str, scope: str) -> PublishedRatio | None:
    """The paper's ratio for a task and a kind of component, if it has one on such prompts."""
    if task in OTHER_WORDINGS:
        return None
    for each in RATIOS:
        if (each.task, each.component, each.scope) == (task, component, scope):
            return each
    return None
