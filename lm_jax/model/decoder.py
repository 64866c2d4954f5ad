"""The decoder: embedding, L blocks over stacked parameters, last norm, logits.

    x = embed(tokens)
    for each layer:
        x = x + mixer(norm1(x))          `norm_placement`: norm(mixer(x)) or norm(mixer(norm1(x)))
        x = x + mlp(norm2(x))            with `parallel_residual`: both read the same x
        x = end(x)                       where blocks have one (`block_end.py`)
    logits = unembed(norm(x))

Parameters of all layers are stacked on a leading axis L and scanned; edits, reducers and attends go
through the same scan as data. `unroll=True` runs the same layers as a Python loop.

Where layers differ in shape there is a stack and a scan for every run of equal layers
(`DecoderConfig.stacks`), under the number of its first layer: `blocks/4/mixer/q`. Edits, records
and attends still have one axis L over all layers.
"""

from collections.abc import Mapping
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model import arguments, block_end, caches, layers, sites, stacks
from lm_jax.model import params as params_lib
from lm_jax.model.attention import Attend, Fused, PerLayer, for_layer, layer_data, softmax
from lm_jax.model.config import DecoderConfig, Stack
from lm_jax.model.edits import resolve
from lm_jax.model.layers import Dropout, RowLengths
from lm_jax.model.mixers import ATTENTION, Layer, Mixer
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.model.rope import Rope

NO_WINDOW = np.int32(2**30)


@struct.dataclass
class Cache:
    """Decoding state: the mixers' caches, stacked over L, and how many positions each row holds.

    As the blocks' parameters, they are one tree or one for each stack.

    `capacity` is how many positions there is room for, on which no result depends. Rotations that
    depend on the length of a sequence (LongRoPE, dynamic NTK) go by the tokens that each row holds
    after a pass. Keys are kept unrotated for them, so that a pass rotates all that a row holds
    alike. What layers above the first made of earlier tokens stays as it was: where `rotates_anew`,
    only reading the whole row again gives what `forward` without a cache does, and
    `lm_jax.model.decode` does that.
    """

    layers: Any
    length_B: jax.Array
    capacity: int = struct.field(pytree_node=False)


@struct.dataclass
class Output:
    """Logits `[B, T, V]` in float32, recorded sites, mixers' extra outputs, the cache.

    `hidden` is the input of the unembedding, `[B, T, D]` after the last norm; a compiled program
    that uses it in place of `logits` (`lm_jax.train.losses`) does not compute them. `records` and
    `aux` of sites inside a layer carry a leading axis L.
    """

    logits: jax.Array
    hidden: jax.Array
    records: dict[str, Any]
    aux: dict[str, Any]
    cache: Cache | None

    def __repr__(self) -> str:
        """The shape of every part: values would fill the screen of a notebook."""
        parts = [f"logits {self.logits.shape}", f"hidden {self.hidden.shape}"]
        for name in ("records", "aux"):
            for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(self, name)):
                parts.append(f"{name}{jax.tree_util.keystr(path)} {jnp.shape(leaf)}")
        if self.cache is not None:
            parts.append(f"cache of {self.cache.capacity:,} positions")
        return f"Output({', '.join(parts)})"


def param_spec(cfg: DecoderConfig, mixer: Mixer = ATTENTION) -> dict[str, Any]:
    """The declaration of every parameter of a decoder."""
    spec = {
        "embed": layers.embed_spec(cfg),
        "blocks": stacks.by_stack(cfg, lambda stack: _stack_spec(stack.cfg, mixer)),
        **block_end.inputs_spec(cfg),
        **_filled({"final": layers.norm_spec(cfg)}),
    }
    if not cfg.tie_embeddings:
        spec["unembed"] = ParamSpec((cfg.hidden_size, cfg.vocab_size), "DV")
    return spec


def _stack_spec(cfg: DecoderConfig, mixer: Mixer) -> dict[str, Any]:
    """The declaration of one stack of blocks."""
    block: dict[str, Any] = {name: layers.norm_spec(cfg) for name in cfg.norm_names}
    block["mixer"] = mixer.spec(cfg)
    if cfg.mlp_size:
        block["mlp"] = layers.mlp_spec(cfg)
    block |= block_end.spec(cfg)
    return params_lib.tree_map(lambda s: s.stacked(cfg.num_layers), _filled(block))


def _filled(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts that have parameters: a tree built from paths has no others."""
    return {name: part for name, part in parts.items() if part}


def init_params(
    key: jax.Array, cfg: DecoderConfig, *, dtype: Any = jnp.float32, mixer: Mixer = ATTENTION
) -> dict[str, Any]:
    """Random parameters for `cfg`."""
    return params_lib.init(key, param_spec(cfg, mixer), dtype)


def count_params(cfg: DecoderConfig, *, mixer: Mixer = ATTENTION) -> int:
    """How many scalars a decoder of this config has; a tied embedding counts once."""
    return params_lib.count(param_spec(cfg, mixer))


def init_cache(
    cfg: DecoderConfig,
    batch: int,
    length: int,
    *,
    dtype: Any = jnp.float32,
    mixer: Mixer = ATTENTION,
) -> Cache:
    """An empty cache for `batch` rows of up to `length` positions."""

    def stacked(stack: Stack) -> Any:
        one = jax.eval_shape(lambda: mixer.init_cache(stack.cfg, batch, length, dtype))
        return jax.tree.map(lambda a: jnp.zeros((len(stack.layers), *a.shape), a.dtype), one)

    return Cache(stacks.by_stack(cfg, stacked), jnp.zeros((batch,), jnp.int32), length)


def grown(cache: Cache, cfg: DecoderConfig, length: int, *, mixer: Mixer = ATTENTION) -> Cache:
    """The cache with room for `length` positions, of a mixer that is not recurrent."""
    before = jax.tree.leaves(cache.layers)
    dtype = before[0].dtype if before else jnp.float32
    batch = cache.length_B.shape[0]
    wanted = jax.eval_shape(lambda: init_cache(cfg, batch, length, dtype=dtype, mixer=mixer))

    def padded(array: jax.Array, longer: jax.ShapeDtypeStruct) -> jax.Array:
        sizes = zip(array.shape, longer.shape, strict=True)
        return jnp.pad(array, [(0, wide - size) for size, wide in sizes])

    return Cache(jax.tree.map(padded, cache.layers, wanted.layers), cache.length_B, length)


def last_change(cfg: DecoderConfig, longest: int) -> int:
    """The longest sequence of up to `longest` tokens that `rotates_anew`; 0 where none does."""
    lengths = [rope.lengths(longest) for rope in _ropes(cfg)]
    return max((each[-1] for each in lengths if len(each) > 1), default=0)


def rotates_anew(cfg: DecoderConfig, tokens: int | jax.Array) -> Any:
    """Whether a sequence of `tokens` tokens is rotated unlike one that is a token shorter."""
    lengths = [rope.lengths(2**30) for rope in _ropes(cfg)]
    return sum((each.start < tokens) & (tokens < each.stop) for each in lengths) > 0


def _ropes(cfg: DecoderConfig) -> list[Rope]:
    return [rope for rope in (cfg.rope, cfg.local_rope) if rope is not None]


def forward(
    params: ParamTree,
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    *,
    edits: Mapping[str, Any] | None = None,
    record: Mapping[str, sites.Reducer] | None = None,
    attend: Attend | Fused | PerLayer = softmax,
    rng: jax.Array | None = None,
    cache: Cache | None = None,
    mixer: Mixer = ATTENTION,
    valid_BT: jax.Array | None = None,
    document_BT: jax.Array | None = None,
    dropout: float = 0.0,
    logits_at: jax.Array | None = None,
    first_layer: jax.Array | int | None = None,
    unroll: bool = False,
    remat: bool = False,
) -> Output:
    """Runs the decoder on token ids `[B, T]`.

    Rows shorter than T are padded on the right: causality keeps padding out of every earlier
    position (without causality, `valid_BT` does). With a cache the tokens continue what it holds,
    row by row.

    Args:
      params: the tree of `param_spec(cfg)`.
      tokens_BT: ids; one outside the vocabulary gives NaN, never another token's row.
      cfg: the static description of the model.
      edits: site name -> edit (`edits.py`), leaves with a leading L for sites of a layer.
      record: site name -> reducer, run inside the layer; `sites.keep` records the site whole.
      attend: the row map (`attention.py`).
      rng: key for mixers that draw and for dropout; each layer gets its own.
      cache: the cache of `init_cache`, or None.
      mixer: the token mixer of every block.
      valid_BT: false where a token is padding, which a recurrent mixer then skips, bidirectional
        attention hides and rotations by length (LongRoPE, dynamic NTK) do not count; None means
        none is. Causal attention of any other rotation needs no such mask.
      document_BT: number of the document that a token is of, where documents are joined in a row;
        each is then read by itself, as if it began a row, at positions that go on. None is one.
      dropout: the share dropped after the embedding, in the MLP's hidden units and from each
        addition to the residual stream; needs `rng`.
      logits_at: positions `[B, Q]` to compute logits at (indices into T); None means all.
      first_layer: number of the first layer to run, which may be traced: one program serves all.
        Layers below are not computed: the embedding, as it was edited, enters this one. L runs
        none. Sites of layers are then not recorded. None runs all.
      unroll: whether to loop over layers in Python in place of `lax.scan`.
      remat: whether to keep only the residual stream of each layer for the backward pass.

    Raises:
      UsageError: for tokens that are no ids `[B, T]`, edits or a record that map no sites, an
        unknown site, one this model does not have, a misshapen edit, a fused
        kernel named while a score site is touched, joined documents with a cache or a mixer that
        cannot separate them, or a first layer with a cache, with records of layers or in a model
        whose layers differ in shape.
    """
    arguments.check_tokens(tokens_BT)
    arguments.check_mapping("edits", edits, "edits: {'attn.z': lm_jax.Scale(0.0)}")
    arguments.check_mapping("record", record, "reducers: {'attn.z': lm_jax.keep}")
    edits, record = resolve(edits, cfg), dict(record or {})
    sites.check_names(edits, "edits")
    sites.check_names(record, "record")
    for name, edit in edits.items():
        sites.check_edit(name, edit, cfg.num_layers)
    if dropout and rng is None:
        raise UsageError(f"dropout = {dropout} needs a random key; pass rng, or dropout=0")
    if document_BT is not None:
        _check_documents(mixer, cache)
    if first_layer is not None:
        _check_first_layer(cfg, record, cache)
    outer = sites.Scope(edits, record)

    T = tokens_BT.shape[1]
    start_B1 = 0 if cache is None else cache.length_B[:, None]
    positions_BT = jnp.broadcast_to(start_B1 + jnp.arange(T)[None], tokens_BT.shape)
    x_BTD = layers.embed(params["embed"], tokens_BT, positions_BT, cfg)
    x_BTD = outer("embed", Dropout(dropout, rng)(x_BTD, "embed"))

    run_layer = functools.partial(
        _layer,
        mixer=mixer,
        record=record,
        attend=attend,
        positions_BT=positions_BT,
        length=_row_lengths(cfg, tokens_BT, cache, valid_BT, document_BT),
        valid_BT=valid_BT,
        document_BT=document_BT,
        dropout=dropout,
    )
    per_layer = {
        "edits": {name: e for name, e in edits.items() if sites.SITES[name].per_layer},
        "attend": layer_data(attend),
        "rng": None if rng is None else jax.random.split(rng, cfg.num_layers),
        "input": block_end.inputs(params, tokens_BT, x_BTD, cfg, outer),
        "index": np.arange(cfg.num_layers, dtype=np.int32),
    }
    run_stack = _unrolled if unroll else _scanned
    if first_layer is not None:
        run_stack = functools.partial(stacks.scanned_from, first_layer)
    carry, outputs, lent, written = (x_BTD, outer.state), [], {}, {}
    for stack in cfg.stacks:
        visited: set[str] = set()
        of_stack = stacks.layers_of(per_layer, cfg, stack) | {
            "params": stacks.of_stack(params["blocks"], cfg, stack),
            "kind": _layer_kinds(stack.cfg),
        }
        run = functools.partial(run_layer, stack=stack, lent=lent.get(stack.cfg.kv))
        before = None if cache is None else stacks.of_stack(cache.layers, cfg, stack)
        (*carry, written[stack]), layer_outputs = run_stack(
            run, (*carry, before), of_stack, visited, remat
        )
        if stack.lends:
            lent[stack.first] = jax.tree.map(lambda a: a[0], layer_outputs["lent"])
        outputs.append(layer_outputs)
        sites.check_layers(edits, record, visited, outer.visited, stack.layers)
        outer.visited |= visited
    x_BTD, outer.state = carry

    x_BTD = outer("final_input", x_BTD)
    if logits_at is not None:
        x_BTD = jnp.take_along_axis(x_BTD, logits_at[:, :, None], axis=1)
    x_BTD = layers.norm(params.get("final", {}), x_BTD, cfg, outer, "final")
    logits = layers.unembed(params, x_BTD, cfg)
    sites.check_visited(edits, record, outer.visited)
    if cache is not None:
        by_stack = stacks.by_stack(cfg, written.__getitem__)
        cache = Cache(by_stack, cache.length_B + T, cache.capacity)
    records, aux = (stacks.joined(outputs, part) for part in ("records", "aux"))
    return Output(logits, x_BTD, outer.records | records, aux, cache)


def _row_lengths(
    cfg: DecoderConfig,
    tokens_BT: jax.Array,
    cache: Cache | None,
    valid_BT: jax.Array | None,
    document_BT: jax.Array | None,
) -> int | RowLengths:
    """How many tokens a row, or a document of it, has after the pass, where rotations go by it."""
    T = tokens_BT.shape[1]
    longest = T if cache is None else cache.capacity
    whole = cache is None and valid_BT is None and document_BT is None
    if whole or not last_change(cfg, longest):
        return T
    valid_BT = jnp.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
    if document_BT is not None:
        same_BTT = document_BT[:, :, None] == document_BT[:, None]
        return RowLengths((same_BTT & valid_BT[:, None]).sum(2), longest)
    held_B1 = 0 if cache is None else cache.length_B[:, None]
    return RowLengths(held_B1 + valid_BT.sum(1, keepdims=True), longest)


def _check_documents(mixer: Mixer, cache: Cache | None) -> None:
    if not getattr(mixer, "separates_documents", False):
        raise UsageError(
            f"document_BT: {type(mixer).__name__} does not reset its state between documents; give "
            "each a row of its own"
        )
    if cache is not None:
        raise UsageError("document_BT: a cache holds one document a row; leave one of them out")


def _check_first_layer(cfg: DecoderConfig, record: Mapping[str, Any], cache: Cache | None) -> None:
    if len(cfg.stacks) > 1:
        raise UsageError("first_layer: this model's layers differ in shape; leave it out")
    if cache is not None:
        raise UsageError("first_layer: a cache needs every layer; leave one of them out")
    if layered := [name for name in record if sites.SITES[name].per_layer]:
        raise UsageError(
            f"record: {', '.join(layered)} of layers that are not run; leave out first_layer"
        )


def _layer_kinds(cfg: DecoderConfig) -> dict[str, np.ndarray] | None:
    """Data of each layer of the stack: the window, and whether positions are local."""
    if not any(cfg.layer_windows):
        return None
    return {
        "window": np.array([w or NO_WINDOW for w in cfg.layer_windows], np.int32),
        "local": np.array([w is not None for w in cfg.layer_windows]),
    }


def _scanned(run_layer, carry, per_layer, visited, remat):
    def layer(carry, layer_inputs):
        return run_layer(carry, layer_inputs, visited)

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, carry, per_layer)


def _unrolled(run_layer, carry, per_layer, visited, remat):
    def layer(carry, layer_inputs):
        return run_layer(carry, layer_inputs, visited)

    layer_outputs = []
    for i in range(jax.tree.leaves(per_layer)[0].shape[0]):
        layer_inputs = jax.tree.map(lambda a, i=i: a[i], per_layer)
        carry, out = (jax.checkpoint(layer) if remat else layer)(carry, layer_inputs)
        layer_outputs.append(out)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_outputs)


def _layer(
    carry,
    layer_inputs,
    visited,
    *,
    stack,
    lent,
    mixer,
    record,
    attend,
    positions_BT,
    length,
    valid_BT,
    document_BT,
    dropout,
):
    """One block; returns the stream, the state of edits and the caches, and the layer's outputs."""
    cfg = stack.cfg
    x_BTD, state, of_layers = carry
    scope = sites.Scope(layer_inputs["edits"], record, visited=visited, state=state)
    p, kind = layer_inputs["params"], layer_inputs["kind"]
    drop = Dropout(dropout, layer_inputs["rng"])
    x_BTD = scope("resid_pre", x_BTD)
    norm1 = functools.partial(_input_norm, p.get("ln1", {}), cfg=cfg, scope=scope)
    cache_rope = None
    if of_layers is not None and isinstance(length, RowLengths) and not mixer.recurrent:
        cache_rope = _rope_tables(cfg, jnp.arange(length.longest)[None], length, kind)
    layer = Layer(
        positions_BT=positions_BT,
        scope=scope,
        attend=for_layer(attend, layer_inputs["attend"]),
        rope=_rope_tables(cfg, positions_BT, length, kind),
        cache_rope=cache_rope,
        window=None if kind is None else kind["window"],
        rng=layer_inputs["rng"],
        index=layer_inputs["index"],
        valid_BT=valid_BT,
        document_BT=document_BT,
        dropout=drop,
        resid_BTD=x_BTD,
        norm=norm1,
        lent=lent,
    )

    h_BTD = norm1(x_BTD, site="ln1")
    slices = caches.of_layer(of_layers, layer_inputs["index"] - stack.first)
    mix = mixer.step if of_layers is not None and x_BTD.shape[1] == 1 else mixer.apply
    with jax.named_scope("mixer"):
        cache = caches.arrays(slices) if mixer.recurrent else slices
        mixed_BTD, cache = mix(p["mixer"], h_BTD, cfg, layer, cache)
        if of_layers is not None:
            of_layers = caches.of_all_layers(slices, cache)
    if "ln1_post" in cfg.norm_names:
        mixed_BTD = layers.norm(p.get("ln1_post", {}), mixed_BTD, cfg, scope, "ln1_post")
    mixed_BTD = scope("attn.out", drop(mixed_BTD, "attn.out"))

    mid_BTD = x_BTD if cfg.parallel_residual else scope("resid_mid", x_BTD + mixed_BTD)
    added_BTD = mixed_BTD if cfg.parallel_residual else None
    if cfg.mlp_size:
        run_mlp = functools.partial(_mlp, cfg=cfg, drop=drop)
        hidden_BTD = layers.rematerialised(run_mlp, scope, p, mid_BTD)
        added_BTD = hidden_BTD if added_BTD is None else hidden_BTD + added_BTD
    x_BTD = mid_BTD if added_BTD is None else mid_BTD + added_BTD
    if cfg.block_end is not None:
        x_BTD = block_end.apply(scope, p["end"], x_BTD, layer_inputs["input"], cfg)
    x_BTD = scope("resid_post", x_BTD)
    layer_outputs = {"records": scope.records, "aux": scope.aux}
    if stack.lends:
        layer_outputs["lent"] = layer.lends
    return (x_BTD, scope.state, of_layers), layer_outputs


def _input_norm(p, x, cfg, scope, site):
    """The norm before the mixer; none of its inner arrays is kept for the backward pass."""
    if "ln1" not in cfg.norm_names:
        return x
    return layers.rematerialised(
        lambda scope, p, x: layers.norm(p, x, cfg, scope, site), scope, p, x
    )


def _mlp(scope, p, x_BTD, *, cfg, drop):
    """The MLP's addition to the residual stream."""
    x_BTD = scope("mlp_input", x_BTD)
    if "ln2" in cfg.norm_names:
        x_BTD = layers.norm(p.get("ln2", {}), x_BTD, cfg, scope, "ln2")
    hidden_BTD = layers.mlp(p["mlp"], x_BTD, cfg, scope, drop)
    if "ln2_post" in cfg.norm_names:
        hidden_BTD = layers.norm(p.get("ln2_post", {}), hidden_BTD, cfg, scope, "ln2_post")
    return scope("mlp.out", drop(hidden_BTD, "mlp.out"))


def _rope_tables(cfg, positions_BT, length, kind):
    def tables(rope):
        return layers.rope_tables(rope, cfg.rotary_width(rope), positions_BT, length)

    if cfg.rope is None:
        return None
    if cfg.local_rope is None or kind is None:
        return tables(cfg.rope)
    near, far = tables(cfg.local_rope), tables(cfg.rope)
    return jax.tree.map(lambda near, far: jnp.where(kind["local"], near, far), near, far)
