"""Names of what a model has inside: sites in both naming styles, and components such as `L7H3`.

A site is written as here, `attn.pattern`, or as in TransformerLens, `blocks.7.attn.hook_pattern`.
"""

import re
from typing import NamedTuple

from lm_jax.errors import UsageError, nearest
from lm_jax.model.sites import SITES

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_COMPONENT = re.compile(r"L(\d+)(?:H(\d+)|\.(attn|mlp))")
# Names of TransformerLens that are not ours with `hook_` before the last word.
_RENAMED = {
    "attn.attn_scores": "attn.scores",
    "attn_out": "attn.out",
    "mlp_out": "mlp.out",
    "mlp_in": "mlp_input",
    "ln_final.scale": "final.scale",
}
# What TransformerLens has and the decoder has no site for, and what to use instead.
_ABSENT = {
    "attn.result": "attn.z holds the output of each head before the projection",
    "attn_in": "q_input, k_input and v_input hold what each head reads",
    "mlp.pre": "mlp.act holds the result of the activation function",
    "pos_embed": "embed holds token and learned position embedding together",
    "ln1.normalized": "ln1.scale holds the divisor of the norm",
    "ln2.normalized": "mlp.in holds what the MLP reads, after the norm and its weights",
    "ln_final.normalized": "the pass returns it as `hidden`",
}


class Place(NamedTuple):
    """A site, one layer of it (None for all), and one head of that layer (None for all)."""

    site: str
    layer: int | None = None
    head: int | None = None


def site(name: str) -> Place:
    """The site that a name of either style means; it has a layer where the name has one.

    Raises:
      UsageError: there is none, with the nearest name or with what holds the same.
    """
    match = _BLOCK.fullmatch(name)
    layer, inner = (int(match[1]), match[2]) if match else (None, name)
    inner = inner.replace("hook_", "")
    inner = _RENAMED.get(inner, inner)
    if inner not in SITES:
        remedy = f"; {_ABSENT[inner]}" if inner in _ABSENT else nearest(inner, SITES)
        raise UsageError(f"no site {name!r}{remedy}")
    if layer is not None and not SITES[inner].per_layer:
        raise UsageError(f"{name!r}: {inner} is no site of a layer; name it {inner!r}")
    return Place(inner, layer)


def component(name: str) -> Place:
    """The place of a head `L7H3`, of all that a mixer or MLP adds `L7.attn`, or of a site.

    Raises:
      UsageError: it is no such name, or a site of every layer without a layer.
    """
    if match := _COMPONENT.fullmatch(name):
        layer = int(match[1])
        if match[2] is not None:
            return Place("attn.z", layer, int(match[2]))
        return Place("attn.out" if match[3] == "attn" else "mlp.out", layer)
    if "." not in name and name not in SITES:
        raise UsageError(
            f"no component {name!r}; name a head 'L7H3', 'L7.attn', 'L7.mlp', or a site of a layer "
            "such as 'blocks.7.hook_resid_post'"
        )
    place = site(name)
    if place.layer is None and SITES[place.site].per_layer:
        raise UsageError(f"{name!r} is a site of every layer; name one, as 'blocks.7.{name}'")
    return place
