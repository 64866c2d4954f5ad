"""Published circuits of "Sparse Attention Post-Training for Mechanistic Interpretability".

Ratios at 90 % of the logit difference over 20 prompts, as printed in Figs 4, 5, 13 and 14; the
figures have no intervals for them. For every model the paper takes zero or mean ablation, whichever
yields the smaller circuit. Our long IOI prompts have other wordings than its own, so that their
ratio is not put beside the paper's (`OTHER_WORDINGS`).
"""

from typing import NamedTuple


class PublishedRatio(NamedTuple):
    """Components of the dense model's circuit over those of the sparse model's."""

    task: str
    model: str
    component: str
    scope: str
    ratio: float
    figure: int


# Tasks of ours whose prompts say something else than the paper's.
OTHER_WORDINGS = ("ioi_long",)
_GPT2, _OLMO = "GPT-2, 0.22 % of edges open", "OLMo-7B, 0.44 % of edges open"
_TASKS = (("greater_than", _GPT2), ("ioi", _GPT2), ("docstring", _OLMO), ("ioi_long", _OLMO))
_FIGURES = (
    (4, "heads", "prompt", (4.5, 2.2, 2.2, 1.4)),
    (5, "token_edges", "prompt", (97.0, 42.8, 8.6, 5.4)),
    (13, "heads", "task", (0.6, 2.0, 1.3, 1.6)),
    (14, "token_edges", "task", (41.9, 14.9, 5.5, 3.1)),
)
RATIOS = (
    # Fig. 3: 61 heads of GPT-2 against 9, on one prompt.
    PublishedRatio("copy", _GPT2, "heads", "prompt", 61 / 9, 3),
    *(
        PublishedRatio(task, model, component, scope, ratio, figure)
        for figure, component, scope, ratios in _FIGURES
        for (task, model), ratio in zip(_TASKS, ratios, strict=True)
    ),
)


def published(task: str, component: str, scope: str) -> PublishedRatio | None:
    """The paper's ratio for a task and a kind of component, if it has one on such prompts."""
    if task in OTHER_WORDINGS:
        return None
    for each in RATIOS:
        if (each.task, each.component, each.scope) == (task, component, scope):
            return each
    return None
