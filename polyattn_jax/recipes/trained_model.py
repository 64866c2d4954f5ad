"""Trained heads as a part of a model's parameters, which every measurement then runs with.

An audited model may hold `TRAINED` among its parameters, as it may hold gates. Where a substitution
puts the trained recipe into heads (`substitute`), these read what was trained of it, and the others
are softmax heads of the frozen model (`trained_attention.HYBRID`). Under softmax, and under an
attend that reports on the rows of softmax, the model is the frozen one.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import BadInputError
from lm_jax.model import decoder, lora
from lm_jax.model.attention import Fused, PerLayer, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output
from lm_jax.model.lora import LoraConfig
from lm_jax.parallel import sharding
from lm_jax.weights.load import Pretrained
from polyattn_jax.recipes import gates, row_maps
from polyattn_jax.recipes.hybrid_recipe import check_model
from polyattn_jax.recipes.row_maps import Map, parse_recipe
from polyattn_jax.recipes.substitute import PerHeadRowMap
from polyattn_jax.recipes.trained_attention import HYBRID, student_attend
from polyattn_jax.recipes.trained_heads import ADAPTERS, MAPS, TrainedHeads

# Where the parameters of a model hold what was trained of its heads.
TRAINED = "trained"


@struct.dataclass
class TrainedPart:
    """What was trained, and what it belongs to; `params` as `TrainedHeads` has them."""

    params: dict[str, Any]
    map: Map = struct.field(pytree_node=False)
    adapters: LoraConfig = struct.field(pytree_node=False)


def with_trained(
    model: Pretrained, heads: TrainedHeads, where: str, mesh: jax.sharding.Mesh | None = None
) -> Pretrained:
    """The model with trained heads among its parameters.

    Args:
      model: the one that the heads were trained on.
      heads: the trained heads.
      where: the folder that they were read from.
      mesh: devices of the model; None for one.

    Raises:
      BadInputError: it is another model, or softmax was trained, which no condition tells from that
        of the model.
    """
    check_model(heads.hybrid, model, where)
    row_map = parse_recipe(heads.hybrid.recipe).map
    if row_map == row_maps.SOFTMAX.map:
        raise BadInputError(
            f"{where}: the heads were trained under softmax, which is what they would be compared "
            "with; train them under another recipe"
        )
    params = jax.tree.map(jnp.asarray, heads.params)
    if mesh is not None:
        params = jax.device_put(params, sharding.replicated(mesh))
    part = TrainedPart(params, row_map, heads.adapters)
    return dataclasses.replace(model, params=dict(model.params) | {TRAINED: part})


def forward(
    params: dict[str, Any],
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    *,
    attend: Any = softmax,
    **options: Any,
) -> Output:
    """`gates.forward` with the trained heads that the parameters hold.

    Args:
      params, tokens_BT, cfg, attend: arguments of `lm_jax.forward`.
      **options: other arguments of `lm_jax.forward`.
    """
    trained: TrainedPart | None = params.get(TRAINED)
    own = {name: each for name, each in params.items() if name != TRAINED}
    given = attend.attend if isinstance(attend, Fused) else attend
    substitutes = isinstance(given, PerLayer) and isinstance(given.fn, PerHeadRowMap)
    if trained is None or not substitutes:
        return gates.forward(own, tokens_BT, cfg, attend=attend, **options)
    data = given.data
    heads_LN, bias = data["heads_N"], data["bias"]
    # Other maps of the substitution stand for softmax: no recipe but the trained one is asked for.
    is_own_L1 = (data["index"] == given.fn.maps.index(trained.map))[:, None]
    student = student_attend(
        trained.map,
        jnp.broadcast_to(bias if bias.ndim == 2 else bias[:, None], heads_LN.shape),
        heads_LN & is_own_L1,
        matrices=trained.params.get(MAPS),
    )
    if ADAPTERS in trained.params:
        own = lora.attach(own, trained.params[ADAPTERS], trained.adapters)
    return decoder.forward(own, tokens_BT, cfg, attend=student, mixer=HYBRID, **options)
