"""AtP*: attribution patching of single places (Kramár et al. 2024, arXiv:2403.00745).

estimates    effects from one backward pass, or from one for each layer (GradDrop)
missed       a bound on the effects of places that nobody patched by themselves
"""

from sparse_jax.circuits.atp_star.estimates import by_method, node_attributions, without_layers
from sparse_jax.circuits.atp_star.missed import MissedBound, Node, bound_missed

__all__ = [
    "MissedBound",
    "Node",
    "bound_missed",
    "by_method",
    "node_attributions",
    "without_layers",
]
