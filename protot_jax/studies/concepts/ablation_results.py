"""Parts of `results.py` on prototypes that are left out, and on what they carry to a token."""

import dataclasses
from typing import Annotated

from lm_jax.run.results import Between, Count


@dataclasses.dataclass(frozen=True)
class Ablation:
    """The effect of a prototype's read gate of 0 on the texts that it writes most.

    Attributes:
      change: mean change of a token's log probability, in nats; below 0 if the prototype helps.
      harm_percentile: how often, in percent, the layer's other prototypes do less harm to the same
        texts where they are not read; ties count half. Null without another prototype.
      controls: number of other prototypes in the layer.
      texts: number of texts.
    """

    change: float
    harm_percentile: Annotated[float, Between(0, 100)] | None
    controls: Count
    texts: Count


@dataclasses.dataclass(frozen=True)
class Carried:
    """What the strongest prototypes add directly to each token's logit, by token of a text.

    The exact parts of `attribution.decomposition` ("direct"), in the order of their absolute sum
    over source tokens. All fields have one row per token, empty where nothing was predicted.

    Attributes:
      layer, prototype: indices of the prototype.
      logit: what it adds to the token's logit, summed over source tokens.
      source: index of the token from which most of it comes; -1 for the mark of the beginning.
      part: what comes from there, a part of `logit`.
    """

    layer: tuple[tuple[Count, ...], ...]
    prototype: tuple[tuple[Count, ...], ...]
    logit: tuple[tuple[float, ...], ...]
    source: tuple[tuple[int, ...], ...]
    part: tuple[tuple[float, ...], ...]
