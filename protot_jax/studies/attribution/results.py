"""Results of an attribution: the dataclasses of `summary.json`, which the page shows.

A reader refuses another version; a field that is added keeps the version, a change of meaning
raises it. Numbers are in units of the logit. Layers, prototypes and positions count from 0; lists
by layer, prototype and position are nested in that order.
"""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count, Share

SCHEMA: Literal["protot_jax.attribution"] = "protot_jax.attribution"
VERSION: Literal[1] = 1


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of the prompt or the vocabulary; `text` is how it is shown."""

    id: Count
    text: str


@dataclasses.dataclass(frozen=True)
class Model:
    """The model, and the checkpoint that was read."""

    seed: Count
    step: Count
    layers: Count
    prototypes: Count
    hidden_size: Count
    parameters: Count
    corpus: str


@dataclasses.dataclass(frozen=True)
class Sources:
    """What tokens, MLPs and constants add over all paths; the three sum to the logit.

    Attributes:
      tokens: part of each position.
      mlps: part of each layer and position.
      constant: part of everything that depends on no token.
    """

    tokens: tuple[float, ...]
    mlps: tuple[tuple[float, ...], ...]
    constant: float


@dataclasses.dataclass(frozen=True)
class Through:
    """Paths through the mixer of each layer; for every layer the three sum to the logit.

    Attributes:
      prototypes: part of each layer and prototype, all pairs of positions together: the logit minus
        that of the frozen model without the prototype.
      bypass: paths past the mixer of each layer.
      later: paths that begin above the mixer of each layer.
      over_count: sum of `prototypes` over all layers, as a multiple of the logit; null for a logit
        of 0.
    """

    prototypes: tuple[tuple[float, ...], ...]
    bypass: tuple[float, ...]
    later: tuple[float, ...]
    over_count: float | None


@dataclasses.dataclass(frozen=True)
class Direct:
    """What the last position is given and the logit reads there; all together are the logit.

    Attributes:
      prototypes: part of each layer and prototype, over all positions.
      mlps: part of each layer.
      token: the embedding of the last token.
      constant: part of everything that depends on no token.
    """

    prototypes: tuple[tuple[float, ...], ...]
    mlps: tuple[float, ...]
    token: float
    constant: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """Effects in the model itself, with everything above computed anew.

    Attributes:
      prototypes: fall of the logit if the prototype is never read, by layer and prototype.
      spearman: rank correlation with `Through.prototypes`; null where one does not vary.
    """

    prototypes: tuple[tuple[float, ...], ...]
    spearman: float | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """One entry of the frozen gates: prototype `prototype` carries token `key` to `query`.

    Attributes:
      share: share of the logit, all paths through the entry.
      weight: value of the entry: read gate times the share of the key in the memory.
    """

    layer: Count
    prototype: Count
    key: Count
    query: Count
    share: float
    weight: float


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Differences of the three sums from the logit of the forward pass.

    Each is relative to the sum of absolute parts, those of layers to the largest of them.
    """

    sources: float
    direct: float
    layers: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest of them."""
        return max(self.sources, self.direct, *self.layers)


@dataclasses.dataclass(frozen=True)
class Target:
    """The attribution of one logit.

    Attributes:
      probability: probability that the token follows the prompt.
      logit: minus the mean over the vocabulary, before a soft cap.
      pairs: those of the largest absolute share, in order.
      pairs_for_90_percent: how many pairs, strongest first, have 90 % of all absolute shares.
      entries: pairs with a share other than 0.
    """

    token: Token
    probability: Share
    logit: float
    sources: Sources
    through: Through
    direct: Direct
    measured: Measured
    pairs: tuple[Pair, ...]
    pairs_for_90_percent: Count
    entries: Count
    certificate: Certificate


@dataclasses.dataclass(frozen=True)
class AttributionReport:
    """The attribution of the next token of one prompt.

    Attributes:
      tokens: tokens of the prompt, with the mark at its beginning.
    """

    schema: Literal["protot_jax.attribution"]
    version: Literal[1]
    model: Model
    prompt: str
    tokens: tuple[Token, ...]
    targets: tuple[Target, ...]
