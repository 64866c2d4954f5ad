"""A cross-layer transcoder: features read from the input of one MLP, written into all later ones.

Sparse Attention Post-Training, Eq. 8 and 9 (cross-layer transcoders are those of Ameisen et al.,
2025). Of MLP inputs x_l and outputs y_l, [..., D]:

    z_s = act(x_s W_enc,s + b_enc,s)                        features [..., F] of layer s
    y_l ~ sum over s in window(l) of z_s W_dec,s->l + b_dec,l

with window(l) = l - window + 1 .. l: all layers up to l for a cross-layer transcoder, and l alone
for a per-layer one. Inputs are those that the model's MLP reads after its norm (`mlp.in`), outputs
are what it adds to the residual stream (`mlp.out`). One that was read from a file may read the
residual stream itself in place of `mlp.in`, and may have a linear path past its features,

    y_l ~ ... + x_l W_skip,l^T                               W_skip [D, D], rows are outputs
"""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar, Literal, get_args

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.frozen import norm_factor
from lm_jax.model.params import ParamSpec, ParamTree, constant, zeros
from lm_jax.model.precision import exact_jit
from lm_jax.parallel.kernels import split_axes
from lm_jax.run.config import LATER
from lm_jax.run.settings import PositiveFloat, PositiveInt, Settings, at_least, choice
from sparse_jax.transcoders.activations import jumprelu, products_of_some, topk

Trained = Literal["jumprelu", "batchtopk", "relu"]
Kind = Literal["jumprelu", "batchtopk", "relu", "topk"]
KINDS = get_args(Kind)

# What circuit-tracer calls the input of an MLP and what the residual stream adds of it.
HOOKS = ("mlp.hook_in", "hook_mlp_out")
# The input before the weights of the norm, and before the norm itself.
BARE_INPUT, STREAM = "ln2.hook_normalized", "hook_resid_mid"
# The output before a norm after the MLP, which some models have.
BARE_OUTPUT = "mlp.hook_out"
# What may be read, and what may be written.
INPUTS, OUTPUTS = (HOOKS[0], BARE_INPUT, STREAM), (HOOKS[1], BARE_OUTPUT)


@dataclasses.dataclass(frozen=True)
class TranscoderConfig(Settings):
    """Sizes and activation function of a transcoder.

    Attributes:
      num_layers: layers of the model.
      hidden_size: D of the model.
      features: F, per layer.
      kind: kind of activation function; "batchtopk" has thresholds too, by which it is evaluated
        and exported; "topk" is of files alone.
      window: the number of layers that a feature writes into, from its own on; None for all of
        them, 1 for a per-layer transcoder.
      bandwidth: width of the band in which the threshold has a derivative (`activations.jumprelu`).
      threshold: initial theta of each feature.
      k: number of features of a layer that are open at a token, of "topk"; 0 for other kinds.
      rectified: whether "topk" leaves out negative pre-activations, as sparsify and SAELens do and
        circuit-tracer does not.

    Raises:
      UsageError: fields are out of range.
    """

    where: ClassVar[str] = "transcoder: "

    num_layers: PositiveInt
    hidden_size: PositiveInt
    features: PositiveInt
    kind: Annotated[Kind, choice(KINDS)] = "jumprelu"
    window: Annotated[int | None, at_least(1)] = None
    bandwidth: PositiveFloat = 1.0
    threshold: PositiveFloat = 0.03
    k: Annotated[int, at_least(0)] = dataclasses.field(default=0, metadata=LATER)
    rectified: bool = dataclasses.field(default=True, metadata=LATER)

    def problems(self) -> list[str]:
        """What does not fit together."""
        if (self.kind == "topk") == (0 < self.k <= self.features):
            return []
        return [f"k = {self.k} must be 1 to {self.features} for kind='topk', and 0 for others"]

    def sources(self, layer: int) -> range:
        """The layers whose features write into this one."""
        first = 0 if self.window is None else layer - self.window + 1
        return range(max(first, 0), layer + 1)

    def targets(self, layer: int) -> range:
        """The layers that the features of this one write into."""
        last = self.num_layers if self.window is None else layer + self.window
        return range(layer, min(last, self.num_layers))

    @property
    def has_thresholds(self) -> bool:
        """Whether features open above a threshold of their own."""
        return self.kind not in ("relu", "topk")


def spec(cfg: TranscoderConfig) -> ParamTree:
    """The declaration of every parameter.

    `decoder/to_<l>` is `[S, F, D]`, of the features of the layers `cfg.sources(l)`. Encoders are
    drawn from U(-1/sqrt(F), 1/sqrt(F)), decoders from U(-1/sqrt(L D), 1/sqrt(L D)) (App. F).
    """
    L, D, F = cfg.num_layers, cfg.hidden_size, cfg.features
    tree: dict = {
        "encoder": ParamSpec((L, F, D), "LFD", _uniform(F**-0.5)),
        "encoder_bias": zeros((L, F), "LF"),
        "decoder": {
            f"to_{layer}": ParamSpec(
                (len(cfg.sources(layer)), F, D), "LFD", _uniform((L * D) ** -0.5)
            )
            for layer in range(L)
        },
        "decoder_bias": zeros((L, D), "LD"),
    }
    if cfg.has_thresholds:
        theta = jnp.log(jnp.float32(cfg.threshold))
        tree["log_threshold"] = constant(float(theta), (L, F), "LF")
    return tree


def equal_features(cfg: TranscoderConfig, window: int) -> int:
    """The features per layer that give a transcoder of this window as many parameters, rounded."""

    def slope(sizes: TranscoderConfig) -> int:
        # The number of parameters is linear in the features, up to the decoder's biases.
        one, two = (dataclasses.replace(sizes, features=count) for count in (1, 2))
        return params_lib.count(spec(two)) - params_lib.count(spec(one))

    return round(cfg.features * slope(cfg) / slope(dataclasses.replace(cfg, window=window)))


def shuffled(transcoder: "Transcoder", seed: int) -> "Transcoder":
    """The transcoder with each layer's decoders in random order, and the rest unchanged.

    A feature keeps its encoder and threshold, and writes what another one of its layer wrote, into
    all targets.
    """
    cfg, rng = transcoder.cfg, np.random.default_rng(seed)
    order_LF = np.stack([rng.permutation(cfg.features) for _ in range(cfg.num_layers)])
    decoder = {
        f"to_{target}": jnp.stack(
            [transcoder.decoder(source, target)[order_LF[source]] for source in cfg.sources(target)]
        )
        for target in range(cfg.num_layers)
    }
    return dataclasses.replace(transcoder, params=dict(transcoder.params) | {"decoder": decoder})


def _uniform(bound: float) -> params_lib.Initializer:
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


@struct.dataclass
class Transcoder:
    """Parameters as in `spec(cfg)`; a pytree.

    One that is not in training has `threshold` in place of its logarithm, and may have W_skip as
    `skip`, `[L, D, D]`. Encoders and decoders of circuit-tracer's and Gemma Scope's files in
    bfloat16 stay so on a GPU, and what is computed of them is float32. `hooks` are the names of its
    inputs and outputs in circuit-tracer; others than `HOOKS` come from files alone. Training left
    out the first `skip_start` tokens of a row, and graphs have no features there.
    """

    params: ParamTree
    cfg: TranscoderConfig = struct.field(pytree_node=False)
    hooks: tuple[str, str] = struct.field(pytree_node=False, default=HOOKS)
    skip_start: int = struct.field(pytree_node=False, default=0)

    @property
    def site(self) -> str:
        """The site of its inputs: "mlp.in", or "resid_mid" for the residual stream itself."""
        return "resid_mid" if self.hooks[0] == STREAM else "mlp.in"

    @property
    def skip_LDD(self) -> jax.Array | None:
        """W_skip of each layer, or None."""
        return self.params.get("skip")

    @property
    def theta_LF(self) -> jax.Array:
        """The threshold of each feature; 0 for ReLU and TopK."""
        if not self.cfg.has_thresholds:
            return jnp.zeros((self.cfg.num_layers, self.cfg.features), jnp.float32)
        if "threshold" in self.params:
            return self.params["threshold"]
        return jnp.exp(self.params["log_threshold"])

    def pre_activations(self, input_LXD: jax.Array) -> jax.Array:
        """`[L, X, F]` of MLP inputs `[L, X, D]`, X any tokens."""
        products_LXF = jnp.einsum("LXD,LFD->LXF", input_LXD, self.params["encoder"])
        return products_LXF + self.params["encoder_bias"][:, None]

    def activate(self, pre_LXF: jax.Array) -> jax.Array:
        """Features of pre-activations, each above its threshold."""
        return activated(self.cfg, pre_LXF, self.theta_LF[:, None])

    def encode(self, input_LXD: jax.Array) -> jax.Array:
        """Features `[L, X, F]` of MLP inputs `[L, X, D]`."""
        return self.activate(self.pre_activations(input_LXD))

    def encode_some(
        self, input_LXD: jax.Array, layer_Y: jax.Array, feature_Y: jax.Array
    ) -> jax.Array:
        """Some features `[X, Y]`, by layer and index, of MLP inputs `[L, X, D]`."""
        at = layer_Y, feature_Y
        if self.cfg.kind == "topk":
            return self._some_of_topk(input_LXD, layer_Y, feature_Y)
        pre_XY = products_of_some(input_LXD, layer_Y, self.params["encoder"][at])
        pre_XY = pre_XY + self.params["encoder_bias"][at][None]
        return activated(self.cfg, pre_XY, self.theta_LF[at][None])

    def _some_of_topk(
        self, input_LXD: jax.Array, layer_Y: jax.Array, feature_Y: jax.Array
    ) -> jax.Array:
        """`encode_some` where all features of a token say whether one is among the largest."""

        def add(value_XY: jax.Array, each: Any) -> tuple[jax.Array, None]:
            input_XD, encoder_FD, bias_F, layer = each
            pre_XF = jnp.einsum("XD,FD->XF", input_XD, encoder_FD) + bias_F[None]
            own_XY = activated(self.cfg, pre_XF, jnp.zeros_like(pre_XF))[:, feature_Y]
            return jnp.where((layer_Y == layer)[None], own_XY, value_XY), None

        L, X, _ = input_LXD.shape
        start_XY = jnp.zeros((X, len(layer_Y)), input_LXD.dtype)
        p = self.params
        each = input_LXD, p["encoder"], p["encoder_bias"], jnp.arange(L)
        return jax.lax.scan(add, start_XY, each)[0]

    def decode(self, features_LXF: jax.Array) -> jax.Array:
        """Reconstructed MLP outputs `[L, X, D]` of features `[L, X, F]`, without W_skip."""
        return self.written(features_LXF) + self.params["decoder_bias"][:, None]

    def reconstruct(self, input_LXD: jax.Array) -> jax.Array:
        """Reconstructed MLP outputs `[L, X, D]` of inputs."""
        output_LXD = self.decode(self.encode(input_LXD))
        if self.skip_LDD is None:
            return output_LXD
        return output_LXD + jnp.einsum("LXD,LED->LXE", input_LXD, self.skip_LDD)

    def written(self, features_LXF: jax.Array) -> jax.Array:
        """What features write into each layer, `[L, X, D]`: `decode` without the bias.

        Where the mesh (`lm_jax.parallel.kernels.under_mesh`) splits features, each device decodes
        its own, and one sum over the axis tensor joins the parts of all layers.
        """
        split = split_axes({"B": 1, "F": self.cfg.features})
        if not split:
            return self._written(self.params["decoder"], features_LXF)
        (axis,) = split["F"]

        def part(decoder: ParamTree, z_LXF: jax.Array) -> jax.Array:
            return jax.lax.psum(self._written(decoder, z_LXF), axis)

        of_features = PartitionSpec(None, axis, None)
        return jax.shard_map(
            part,
            in_specs=(
                jax.tree.map(lambda _: of_features, self.params["decoder"]),
                PartitionSpec(None, None, axis),
            ),
            out_specs=PartitionSpec(),
            axis_names={axis},
        )(self.params["decoder"], features_LXF)

    def _written(self, decoder: ParamTree, features_LXF: jax.Array) -> jax.Array:
        outputs = []
        for layer in range(self.cfg.num_layers):
            sources = self.cfg.sources(layer)
            w_SFD = decoder[f"to_{layer}"]
            z_SXF = features_LXF[sources.start : sources.stop]
            # One product with S F columns: the sums over layers are within it.
            z_XSF = z_SXF.swapaxes(0, 1)
            S, F, D = w_SFD.shape
            outputs.append(z_XSF.reshape(-1, S * F) @ w_SFD.reshape(S * F, D))
        return jnp.stack(outputs)

    def decoder(self, source: int, target: int) -> jax.Array:
        """W_dec from the features of layer `source` into layer `target`, `[F, D]`."""
        first = self.cfg.sources(target).start
        return self.params["decoder"][f"to_{target}"][source - first]

    @property
    def signed(self) -> bool:
        """Whether activations may be below 0: of the k largest where they are not rectified."""
        return self.cfg.kind == "topk" and not self.cfg.rectified

    @property
    def decoder_bias_LD(self) -> jax.Array:
        """What outputs are without any feature."""
        return self.params["decoder_bias"]

    def check(self, cfg: DecoderConfig) -> None:
        """Raises an error if the transcoder does not fit a model.

        Raises:
          UsageError: sizes differ, a parameter is not finite, or it reads or writes what in this
            model is no input or output of an MLP.
        """
        for name in ("num_layers", "hidden_size"):
            if getattr(cfg, name) != getattr(self.cfg, name):
                raise UsageError(
                    f"transcoder: its {name} is {getattr(self.cfg, name)}, but that of the model "
                    f"is {getattr(cfg, name)}; give a transcoder that was trained on this model"
                )
        for hook, known in zip(self.hooks, (INPUTS, OUTPUTS), strict=True):
            if hook not in known:
                raise UsageError(
                    f"transcoder: {hook!r} is no input or output of an MLP here; give one with "
                    f"{', '.join(known)}"
                )
        if BARE_INPUT in self.hooks and cfg.norm_weights:
            raise UsageError(
                f"transcoder: it reads {BARE_INPUT}, inputs of MLPs before the weights of their "
                "norm; pass transcoder.for_model(params, cfg), which reads them after"
            )
        if STREAM in self.hooks and cfg.parallel_residual:
            raise UsageError(
                f"transcoder: it reads {STREAM}, and the blocks of this model have no residual "
                "stream between attention and MLP; give a transcoder of this model"
            )
        if BARE_OUTPUT in self.hooks and "ln2_post" in cfg.norm_names:
            raise UsageError(
                f"transcoder: it writes {BARE_OUTPUT}, which passes a norm in this model; give one "
                f"with feature_output_hook: {HOOKS[1]}"
            )
        finite = jax.tree.leaves(_finite(self.params))
        for (name, _), is_finite in zip(
            jax.tree.flatten_with_path(self.params)[0], finite, strict=True
        ):
            if not bool(is_finite):
                raise UsageError(
                    f"transcoder: {jax.tree_util.keystr(name)} holds numbers that are not finite; "
                    "give an earlier checkpoint"
                )

    def for_model(self, params: ParamTree, cfg: DecoderConfig) -> "Transcoder":
        """The transcoder with inputs that the model has: after the weights of its norms.

        Of an input x' before the weights w of an RMS norm, x = w x' after them, so that
        W_enc x' = (W_enc / w) x. The layer norm of TransformerLens, which the name of the input is
        of, has its weights and bias in that place already, so that only the name differs. Of any
        other input it is itself.

        Args:
          params: parameters of the model.
          cfg: configuration of the model.

        Raises:
          UsageError: a weight is 0, so that its input is lost, or MLPs have no norm before them.
        """
        if BARE_INPUT not in self.hooks:
            return self
        if "ln2" not in cfg.norm_names:
            raise UsageError(
                f"transcoder: it reads {BARE_INPUT}, and this model has no norm before its MLPs; "
                "give a transcoder of this model"
            )
        if not cfg.norm_weights:
            return self
        self.check(dataclasses.replace(cfg, norm_weights=False))
        named = dataclasses.replace(self, hooks=(HOOKS[0], self.hooks[1]))
        if cfg.norm == "layer":
            return named
        one_L11 = jnp.ones((cfg.num_layers, 1, 1), jnp.float32)
        norm = jax.tree.map(lambda x: x.astype(jnp.float32), params["blocks"].get("ln2"))
        weight_L1D, _ = norm_factor(norm, one_L11, cfg)
        if not bool((weight_L1D != 0).all()):
            raise UsageError(
                f"transcoder: it reads {BARE_INPUT}, and a weight of the norms of this model is 0, "
                "so that this input cannot be had from the MLP's; give a transcoder that reads "
                f"{HOOKS[0]}"
            )
        own = {"encoder": self.params["encoder"] / weight_L1D}
        if self.skip_LDD is not None:
            own["skip"] = self.skip_LDD / weight_L1D
        return dataclasses.replace(named, params=dict(self.params) | own)

    def for_prompt(self, input_LTD: jax.Array) -> "Transcoder":
        """Itself: nothing in it depends on a prompt (`graphs.basis`)."""
        del input_LTD
        return self

    def readings(
        self, layer_X: jax.Array, position_X: jax.Array, feature_X: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Encoders `[X, D]` and encoder biases `[X]` of features, at any positions."""
        del position_X
        at = layer_X, feature_X
        return self.params["encoder"][at].astype(jnp.float32), self.params["encoder_bias"][at]

    def writes_into(
        self,
        layer: jax.Array | int,
        layer_X: jax.Array,
        feature_X: jax.Array,
        activation_X: jax.Array,
    ) -> jax.Array:
        """What features write into one layer `[X, D]`: activation times decoder."""

        def into(target: int) -> jax.Array:
            sources = self.cfg.sources(target)
            w_SFD = self.params["decoder"][f"to_{target}"]
            index_X = layer_X - sources.start
            within_X = (index_X >= 0) & (index_X < len(sources))
            w_XD = w_SFD[jnp.clip(index_X, 0, len(sources) - 1), feature_X]
            return w_XD * jnp.where(within_X, activation_X, 0.0)[:, None]

        if isinstance(layer, int):
            return into(layer)
        each = [functools.partial(into, target) for target in range(self.cfg.num_layers)]
        return jax.lax.switch(layer, each)

    def decoder_norms(self) -> jax.Array:
        """Norm of each feature's decoders over all targets together, `[L, F]`."""
        squares_LF = [
            sum(
                jnp.sum(self.decoder(source, target).astype(jnp.float32) ** 2, -1)
                for target in targets
            )
            for source, targets in enumerate(map(self.cfg.targets, range(self.cfg.num_layers)))
        ]
        return jnp.sqrt(jnp.stack(squares_LF))

    def folded(self, scale_in_L: jax.Array, scale_out_L: jax.Array) -> "Transcoder":
        """The transcoder of raw activations, if this one was trained on scaled ones.

        It was trained on inputs times `scale_in_L` and outputs times `scale_out_L`. Thresholds and
        encoder biases are those of the scaled inputs and stay.
        """
        p = self.params
        decoder = {
            f"to_{layer}": p["decoder"][f"to_{layer}"] / scale_out_L[layer]
            for layer in range(self.cfg.num_layers)
        }
        folded = {
            "encoder": p["encoder"] * scale_in_L[:, None, None],
            "decoder": decoder,
            "decoder_bias": p["decoder_bias"] / scale_out_L[:, None],
        }
        if self.cfg.has_thresholds:
            folded["threshold"] = self.theta_LF
        if self.skip_LDD is not None:
            folded["skip"] = self.skip_LDD * (scale_in_L / scale_out_L)[:, None, None]
        kept = {name: leaf for name, leaf in p.items() if name != "log_threshold"}
        return dataclasses.replace(self, params=kept | folded)


@exact_jit
def _finite(params: ParamTree) -> Any:
    """Whether all numbers of each parameter are finite, by one program."""
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)


def activated(cfg: TranscoderConfig, pre: jax.Array, theta: jax.Array) -> jax.Array:
    """Features `[..., F]` of pre-activations, with thresholds that broadcast against them."""
    if cfg.kind == "topk":
        return topk(pre, cfg.k, rectified=cfg.rectified)
    if not cfg.has_thresholds:
        return jax.nn.relu(pre)
    return jumprelu(pre, theta, cfg.bandwidth)


def init(
    key: jax.Array,
    cfg: DecoderConfig,
    *,
    features: int,
    kind: Trained = "jumprelu",
    window: int | None = None,
) -> Transcoder:
    """A transcoder of a model with random weights; the options are of `TranscoderConfig`."""
    own = TranscoderConfig(cfg.num_layers, cfg.hidden_size, features, kind, window)
    return Transcoder(params_lib.init(key, spec(own)), own)
