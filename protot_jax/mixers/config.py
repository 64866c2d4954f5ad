"""Settings of the prototype mixer (`prototypes.py`), which are those of `config.prototypes`."""

import dataclasses
from typing import Annotated, ClassVar

from lm_jax.model.rope import LARGEST
from lm_jax.run.settings import Bound, Settings, ShareBelow1
from protot_jax.mixers.routing import Routing

_THETA = Bound(f"above 1 and at most {LARGEST:g}", lambda value: 1 < value <= LARGEST)


@dataclasses.dataclass(frozen=True)
class Prototypes(Settings):
    """Settings of the mixer that the paper ablates, with its defaults.

    Attributes:
      num_prototypes: number R of prototypes of each layer.
      low_rank: values of width max(8, D // 2), else D.
      conv_kernel: taps of the local convolution, the current token included.
      conv_layers: number of first layers that use it. Its weights exist in every layer, as in the
        released code, whose parameter count the paper states.
      shared_routing: whether the first layer reads with its write gate. W and tau_r exist there,
        unused.
      temperature: initial tau of all layers but the first.
      first_temperature: initial tau of the first layer. Logits are divided by it, so that 3 is
        flatter than 1; the paper calls it sharper.
      alpha: initial factor on the mixer's output.
      decay: initial beta of every prototype.
      mass_normalisation: false leaves out the denominator of Eq. 2 and reads the moving average
        (1 - beta) sum_{j<i} beta^(i-1-j) w_jr v_j, as the released code does, whose factor
        1 - beta cancels only in the mean. Table 18 of the paper was trained this way.
      heads: N; it divides the model's width, the width of the values and `num_prototypes`.
      routing: map of logits to gates: "softmax", "top_k" or "sparsemax" (`routing.gates`).
      top_k: prototypes of a head with a gate above zero, for routing "top_k".
      prototype_dropout: share of the prototypes that are hidden from a row in training.
      rotary_queries: whether to turn W x_i by the place of token i in its document, so that the
        read gate can depend on it; prototypes are not turned (`rotary`).
      rotary_values: whether to turn values by their distance from the token that reads them.
      rotary_theta: base of the frequencies of both.
      entropy_weight: weight in the training loss of the mean entropy of the gates, which makes them
        sharper (`routing_loss`).
      balance_weight: weight in the training loss of the divergence of the prototypes' shares from
        equal ones.

    Raises:
      UsageError: for fields that do not fit each other.
    """

    where: ClassVar[str] = "prototypes."

    num_prototypes: int = 32
    low_rank: bool = True
    conv_kernel: int = 5
    conv_layers: int = 2
    shared_routing: bool = True
    first_temperature: float = 3.0
    temperature: float = 1.0
    alpha: float = 1.0
    decay: float = 0.9
    mass_normalisation: bool = True
    heads: int = 1
    routing: Routing = "softmax"
    top_k: int = 0
    prototype_dropout: ShareBelow1 = 0.0
    rotary_queries: bool = False
    rotary_values: bool = False
    rotary_theta: Annotated[float, _THETA] = 10_000.0
    entropy_weight: float = 0.0
    balance_weight: float = 0.0

    def problems(self) -> list[str]:
        """What does not fit together."""
        of_head, odd = divmod(self.num_prototypes, self.heads) if self.heads > 0 else (0, 1)
        if odd:
            return [
                f"prototypes.heads = {self.heads} must divide num_prototypes = "
                f"{self.num_prototypes}"
            ]
        if not (1 <= self.top_k <= of_head if self.routing == "top_k" else self.top_k == 0):
            return [
                f"prototypes.top_k = {self.top_k} must be from 1 to the {of_head} prototypes of a "
                "head with routing = 'top_k', and 0 with another"
            ]
        return []
