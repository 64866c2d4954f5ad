"""How the routing of a ProtoT stands while it trains: numbers of every layer at every evaluation.

The statistics that the authors' code prints for each epoch (spec row PT-45), and those of appendix
A.7.1, over a fixed sample of validation text. Names are `layer_<l>/<what>`:

    alpha, write_tau, read_tau       the scalars; |tau| is what gates are divided by
    half_life_min, _median, _max     in tokens
    write_..., read_...              gates: `gini` and `max_share` of the prototypes' shares of all
                                     tokens, `top_1` the mean largest gate, `dead` how many never
                                     reach 0.01, `logit_std` over everything
    js_read_write                    Jensen-Shannon divergence of the two gates of a token, in nats
    mass                             mean D of Eq. 2, what a prototype's mean is divided by
    value_norm, prototype_norm       of the value matrix (Frobenius), and the mean of the rows of P
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import numpy as np
from scipy import special

from lm_jax import sharding, sites
from lm_jax.config import DecoderConfig
from lm_jax.decoder import forward
from lm_jax.params import ParamTree
from lm_jax.train.loop import Measure
from lm_jax.train.objective import PAD
from protot_jax.concepts import measures
from protot_jax.mixer import PrototypeMixer

_SCALARS = ("alpha", "write_tau", "read_tau")
_SITES = ("mixer.write", "mixer.read", "mixer.write_logits", "mixer.read_logits")


def router_statistics(cfg: DecoderConfig, mixer: PrototypeMixer, tokens_NT: np.ndarray) -> Measure:
    """A `measure` for `lm_jax.train.loop.train`, on these rows of ids; 0 is padding."""
    valid_NT = tokens_NT != PAD
    look = jax.jit(functools.partial(_gates, cfg=cfg, mixer=mixer))

    def measure(params: ParamTree, *rest: Any) -> dict[str, float]:
        del rest
        found = sharding.fetch(look(params, tokens_NT))
        own = sharding.fetch(params["blocks"]["mixer"])
        numbers = {}
        for layer in range(cfg.num_layers):
            gates = {name: x[layer] for name, x in found.items()}
            scalars = {name: own[name][layer] for name in _SCALARS}
            values = scalars | of_gates(gates, own["decay_logit"][layer], valid_NT)
            values["value_norm"] = np.linalg.norm(own["value"][layer])
            values["prototype_norm"] = np.linalg.norm(own["prototypes"][layer], axis=-1).mean()
            numbers |= {f"layer_{layer}/{name}": float(x) for name, x in values.items()}
        return numbers

    return measure


def _gates(params: ParamTree, tokens_NT: Any, *, cfg: DecoderConfig, mixer: PrototypeMixer) -> Any:
    record = dict.fromkeys(_SITES, sites.keep)
    output = forward(params, tokens_NT, cfg, mixer=mixer, record=record, valid_BT=tokens_NT != PAD)
    return output.records


def of_gates(
    gates: Mapping[str, np.ndarray], decay_logit_R: np.ndarray, valid_NT: np.ndarray
) -> dict[str, Any]:
    """The numbers of one layer that need its gates; `gates` are `[N, T, R]` by site."""
    half_life_R = measures.half_life(decay_logit_R)
    found = {
        "half_life_min": half_life_R.min(),
        "half_life_median": np.median(half_life_R),
        "half_life_max": half_life_R.max(),
    }
    kept = {name: np.asarray(x, np.float64)[valid_NT] for name, x in gates.items()}
    for name in ("write", "read"):
        gate_MR = kept[f"mixer.{name}"]
        share_R = gate_MR.mean(0)
        found |= {
            f"{name}_gini": measures.gini(share_R),
            f"{name}_max_share": share_R.max() / share_R.sum(),
            f"{name}_top_1": gate_MR.max(1).mean(),
            f"{name}_dead": (gate_MR.max(0) < measures.ACTIVE).sum(),
            f"{name}_logit_std": kept[f"mixer.{name}_logits"].std(),
        }
    write_MR, read_MR = kept["mixer.write"], kept["mixer.read"]
    found["js_read_write"] = jensen_shannon(write_MR, read_MR).mean()
    decay_R = special.expit(np.asarray(decay_logit_R, np.float64))
    write_NTR = np.asarray(gates["mixer.write"], np.float64)
    memory = [measures.memory(write_NTR[..., r], decay) for r, decay in enumerate(decay_R)]
    # D discounts the last write once, and is not scaled by 1 - beta.
    mass_NTR = np.stack(memory, -1) * decay_R / (1.0 - decay_R)
    found["mass"] = mass_NTR[valid_NT].mean()
    return found


def jensen_shannon(p_MR: np.ndarray, q_MR: np.ndarray) -> np.ndarray:
    """The divergence of each row of probabilities in nats, at most ln 2."""
    mean_MR = (p_MR + q_MR) / 2
    return (special.rel_entr(p_MR, mean_MR) + special.rel_entr(q_MR, mean_MR)).sum(-1) / 2
