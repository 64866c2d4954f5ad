"""The places inside a forward pass that can be read and edited: a closed table of names.

The names are those of TransformerLens without `hook_`. An edit or a reducer is given by site name;
`Scope` carries them through one layer and is all that a layer calls: `x = scope("attn.q", x)`.

Shapes are written with the letters of the dimension key; 1 is an axis of length one. Sites inside a
layer exist once per layer: edits and records of those carry a leading axis L.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax

from lm_jax.errors import UsageError, nearest

Reducer = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Site:
    """One place: the letters of its axes, what it holds, and whether every layer has it."""

    dims: str
    about: str
    per_layer: bool = True


SITES: Mapping[str, Site] = {
    "embed": Site("BTD", "token (and learned position) embedding, after its scale", False),
    "resid_pre": Site("BTD", "residual stream entering the layer"),
    "ln1.scale": Site("BT1", "divisor of the norm before the mixer (not in OLMo 2)"),
    "q_input": Site("BTND", "residual stream that each head's query reads, before the norm"),
    "k_input": Site("BTKD", "residual stream that each head's key reads, before the norm"),
    "v_input": Site("BTKD", "residual stream that each head's value reads, before the norm"),
    "q_input.scale": Site("BTN1", "divisor of the norm of `q_input`"),
    "k_input.scale": Site("BTK1", "divisor of the norm of `k_input`"),
    "v_input.scale": Site("BTK1", "divisor of the norm of `v_input`"),
    "attn.q": Site("BTNH", "queries, as projected"),
    "attn.k": Site("BSKH", "keys of the given tokens, as projected"),
    "attn.v": Site("BSKH", "values as weighted: of the given tokens, or another layer's"),
    "attn.v_norm.scale": Site("BSK1", "divisor of the value norm (Gemma 4)"),
    "attn.q_norm.scale": Site(
        "BTN1", "divisor of the query norm; N is 1 for a norm over all heads"
    ),
    "attn.k_norm.scale": Site("BSK1", "divisor of the key norm; K is 1 for a norm over all heads"),
    "attn.rot_q": Site("BTNH", "queries as scored: after norm and rotation"),
    "attn.rot_k": Site("BSKH", "keys as scored: after norm and rotation, or another layer's"),
    "attn.scores": Site("BNTS", "scaled, capped scores in float32; -inf on masked keys"),
    "attn.pattern": Site("BNTS", "attention weights, the result of the attend, in float32"),
    "attn.z": Site("BTNH", "weighted sum of values, per head"),
    "attn.out": Site("BTD", "mixer output as added to the residual stream"),
    "ln1_post.scale": Site("BT1", "divisor of the norm after the mixer (Gemma, OLMo 2)"),
    "resid_mid": Site("BTD", "residual stream between mixer and MLP (not in parallel blocks)"),
    "mlp_input": Site("BTD", "residual stream that the MLP reads, before the norm"),
    "ln2.scale": Site("BT1", "divisor of the norm before the MLP (not in OLMo 2)"),
    "mlp.in": Site("BTD", "input of the MLP, after the norm before it"),
    "mlp.act": Site("BTF", "result of the MLP's activation function, before the product with `up`"),
    "mlp.post": Site("BTF", "hidden units of the MLP, after activation and gate"),
    "mlp.out": Site("BTD", "MLP output as added to the residual stream"),
    "ln2_post.scale": Site("BT1", "divisor of the norm after the MLP (Gemma, OLMo 2)"),
    "layer_input": Site("BTJ", "input of the layer's own, of token and embedding (Gemma 4)"),
    "layer_input.scale": Site("BT1", "divisor of the norm after the layer's own input (Gemma 4)"),
    "layer_input.out": Site("BTD", "what the layer's own input adds to the residual stream"),
    "resid_post": Site("BTD", "residual stream leaving the layer"),
    "layer_inputs.scale": Site(
        "BTL1", "divisor of the norm of what the layers' own inputs take from the embedding", False
    ),
    "final_input": Site("BTD", "residual stream that the logits read, before the norm", False),
    "final.scale": Site("BT1", "divisor of the last norm", False),
    "mixer.write_logits": Site("BTR", "write logit of each prototype, after the temperature"),
    "mixer.read_logits": Site("BTR", "read logit of each prototype, after the temperature"),
    "mixer.write": Site("BTR", "write gate of each prototype"),
    "mixer.read": Site("BTR", "read gate of each prototype"),
    "mixer.memory": Site("BTRE", "memory of each prototype before the position"),
}

SCORE_SITES = frozenset({"attn.scores", "attn.pattern"})
# Where one is touched, every head reads, normalises and projects a residual stream of its own in
# place of the one that `ln1` normalises.
HEAD_INPUT_SITES = frozenset(
    f"{name}_input{part}" for name in ("q", "k", "v") for part in ("", ".scale")
)


class StatefulEdit:
    """Base class of edits that share a state: `edit(x, state) -> (x, state)`.

    The state is any pytree. It starts as None at `embed`, the first site, and passes through all
    stateful edits of a forward pass in the order of the sites, from layer to layer; its structure
    is fixed from the first layer on. Leaves of an edit inside a layer have a leading axis L and
    any further axes.
    """

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        raise NotImplementedError


class FunctionEdit:
    """Base class of edits of an elementwise function: `edit.apply(f, x)` in place of `f(x)`.

    They are for sites that hold the result of one, such as `mlp.act`, and are the only edit there.
    """

    def apply(self, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> jax.Array:
        raise UsageError(
            f"edits: {type(self).__name__} edits a function, not an array; use it at mlp.act, and "
            "alone"
        )


def check_names(names: Mapping[str, Any], role: str) -> None:
    """Raises for a name that is not in the table, with the nearest one that is."""
    for name in names:
        if name not in SITES:
            raise UsageError(f"{role}: no site {name!r}{nearest(name, SITES)}")


def check_edit(name: str, edit: Any, num_layers: int) -> None:
    """Raises where a leaf of `edit` has not one axis per letter, layers first.

    Raises:
      UsageError: naming the site, the shape and the expected letters.
    """
    site = SITES[name]
    letters = ("L" if site.per_layer else "") + site.dims
    for leaf in jax.tree.leaves(edit):
        shape = jax.numpy.shape(leaf)
        if len(shape) != len(letters) and not isinstance(edit, StatefulEdit):
            raise UsageError(
                f"edits[{name!r}]: a leaf has shape {shape}; expected {len(letters)} axes "
                f"{letters} (length 1 broadcasts, except L = {num_layers})"
            )
        if site.per_layer and shape[:1] != (num_layers,):
            raise UsageError(
                f"edits[{name!r}]: a leaf has shape {shape}; its first axis L must be {num_layers}"
            )


@dataclasses.dataclass
class Scope:
    """Edits and reducers of one layer, its records, the state of edits, and the sites visited.

    Exists only while a layer is traced. `visited` lets the decoder refuse a site that the model
    does not have: an edit is never ignored silently.
    """

    edits: Mapping[str, Any]
    record: Mapping[str, Reducer]
    records: dict[str, Any] = dataclasses.field(default_factory=dict)
    aux: dict[str, Any] = dataclasses.field(default_factory=dict)
    visited: set[str] = dataclasses.field(default_factory=set)
    state: Any = None

    def touches(self, names: frozenset[str]) -> bool:
        """Whether any of `names` is edited or recorded."""
        return any(name in self.edits or name in self.record for name in names)

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Passes `x` through the edit of the site, if any, and records what comes out."""
        x = self.edit(name, x)
        self.observe(name, x)
        return x

    def function(
        self, name: str, function: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """`function(x)` as the value of a site, or what a `FunctionEdit` there makes of it."""
        edit = self.edits.get(name)
        if not isinstance(edit, FunctionEdit):
            return self(name, function(x))
        self.visited.add(name)
        y = _checked(name, x, edit.apply(function, x))
        self.observe(name, y)
        return y

    def edit(self, name: str, x: jax.Array) -> jax.Array:
        """Applies the edit of the site alone."""
        self.visited.add(name)
        if name not in self.edits:
            return x
        edit = self.edits[name]
        if not isinstance(edit, StatefulEdit):
            return _apply(name, edit, x)
        y, self.state = edit(x, self.state)
        return _checked(name, x, y)

    def observe(self, name: str, x: jax.Array) -> None:
        """Records the site alone."""
        if name in self.record:
            self.records[name] = self.record[name](x)


def _apply(name: str, edit: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    for leaf in jax.tree.leaves(edit):
        for letter, have, want in zip(SITES[name].dims, leaf.shape, x.shape, strict=True):
            if have not in (1, want):
                raise UsageError(
                    f"edits[{name!r}]: a leaf has {letter} = {have}; expected 1 or {want} "
                    f"({SITES[name].dims} = {x.shape})"
                )
    return _checked(name, x, edit(x))


def _checked(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """What an edit made of `x`, in its dtype.

    Raises:
      UsageError: it has another shape.
    """
    if y.shape != x.shape:
        raise UsageError(f"edits[{name!r}] returned shape {y.shape}; expected {x.shape}")
    return y.astype(x.dtype)


def keep(x: jax.Array) -> jax.Array:
    """The reducer that records a site whole."""
    return x


def check_visited(edits: Mapping[str, Any], record: Mapping[str, Any], visited: set[str]) -> None:
    """Raises for a known site that this model never passed through."""
    for role, names in (("edits", edits), ("record", record)):
        for name in names:
            if name not in visited:
                raise UsageError(
                    f"{role}: this model has no site {name!r}; it has: {', '.join(sorted(visited))}"
                )


def check_layers(
    edits: Mapping[str, Any],
    record: Mapping[str, Any],
    visited: set[str],
    before: set[str],
    layers: range,
) -> None:
    """Raises for a site that layers before `layers` have and these do not, or the other way round.

    `visited` are the sites of these layers, `before` those of all before them.
    """
    for role, names in (("edits", edits), ("record", record)):
        for name in names:
            if SITES[name].per_layer and layers.start and (name in visited) != (name in before):
                lacking = f"{layers[0]}..{layers[-1]}" if name in before else f"0..{layers[0] - 1}"
                raise UsageError(
                    f"{role}: layers {lacking} of this model have no site {name!r}, which others "
                    "have; use one that all have, such as attn.v or attn.rot_k"
                )
