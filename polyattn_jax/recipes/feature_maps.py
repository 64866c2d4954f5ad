"""Feature maps that may replace softmax: weights phi(q).phi(k) / sum, with S_phi on those products.

"When Does Polynomial Attention Concentrate?", Appendix A, predicts that a feature map works where
S < 1 on the row phi(q).phi(k) in place of the scores; S of that row is Appendix T's S_phi. With x a
query or a key of width H, and H features unless said otherwise,

    elu1        elu(x) + 1                          Katharopoulos et al. 2020, arXiv:2006.16236
    hedgehog    softmax of the 2 H numbers (Wx, -Wx)    Zhang et al. 2024, arXiv:2402.04347,
                                                    untrained: W = 1
    performer   e^(w.y - |y|^2 / 2) / sqrt m, with      Choromanski et al. 2021, arXiv:2009.14794,
                y = sqrt(scale) x, for m random w   positive orthogonal random features

All features are positive. The products are kept as logarithms, "scores" whose softmax is the
pattern: S_phi is S of softmax on them, with its error bound (which takes them as exact), and
neither the features nor their products overflow.

For Performer phi(q).phi(k) has the mean e^(scale q.k) over draws of w, so its scores are noisy
softmax scores. The m vectors w are drawn in blocks of H orthogonal ones with the lengths of normal
vectors, the same for all heads and layers. No epsilon is added to the features, as released code
does, since it biases the estimate. Hedgehog and elu1 read q and k without the scale, as their code
does. A soft cap on the scores has no counterpart and is left out.

With a window (`w`, `sinks`) a row has softmax on its last w keys and its first few, and the feature
map on the others, under one sum (LoLCATs, Zhang et al. 2024, arXiv:2410.10254, which has no first
keys). With z the model's own scores and c the largest of a row inside, the weights are

    inside     gamma e^(z - c) of elu1 and hedgehog, gamma e^z of performer, which estimates e^z
    outside    phi(q).phi(k)

In a model that caps its scores, z inside is capped and the estimate of performer outside is not.
LoLCATs learns gamma, from 0.1 on; here it is fixed. A state of the features and a cache of the
window and the sinks compute them token by token: a key enters the state as it leaves the window.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.run.config import LATER
from polyattn_jax.recipes.field_maps import within

Kind = Literal["elu1", "hedgehog", "performer"]


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """One feature map; hashable. `m` features and the random `seed` are those of Performer.

    `w` is the width of a window, 0 for none, `sinks` how many first keys belong to it, and `gamma`
    the factor of its weights.
    """

    kind: Kind
    m: int = 0
    seed: int = 0
    w: int = dataclasses.field(default=0, metadata=LATER)
    sinks: int = dataclasses.field(default=0, metadata=LATER)
    gamma: float = dataclasses.field(default=1.0, metadata=LATER)

    degree = None
    signed = False
    normalised = True

    @property
    def trained(self) -> bool:
        """Whether the map has a matrix W for queries and one for keys, to be trained."""
        return self.kind == "hedgehog"

    def size(self, width: int) -> int:
        """Number of features of a head of this width."""
        return {"elu1": width, "hedgehog": 2 * width, "performer": self.m}[self.kind]

    def log_features(self, x: jax.Array, scale: float) -> jax.Array:
        """The logarithms of phi(x), `[..., size]`, in float32 or the dtype of x if that is wider.

        Args:
          x: queries or keys `[..., H]`, for Hedgehog after W.
          scale: factor of the scores, scale q.k.
        """
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        match self.kind:
            case "elu1":
                return jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), x)
            case "hedgehog":
                return jax.nn.log_softmax(jnp.concatenate([x, -x], -1))
            case "performer":
                y = math.sqrt(scale) * x
                w_MH = jnp.asarray(random_vectors(self.m, x.shape[-1], self.seed), y.dtype)
                along = jnp.einsum("...H,MH->...M", y, w_MH, precision="highest")
                return along - (y * y).sum(-1, keepdims=True) / 2 - math.log(self.m) / 2
            case _:
                raise ValueError(f"no feature map of kind {self.kind!r}")

    def scores(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        scale: float,
        matrices: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """log phi(q).phi(k), `[B, N, T, S]`, without a mask and a window.

        With a and c the log features and a*, c* the largest of each, that is
        a* + c* + log sum_f e^(a_f - a*) e^(c_f - c*). Where this sum is below 2^-102 times the
        number of features it loses terms, down to -inf: all large features of the query are then
        small in the key.

        Args:
          q_BTNH: queries as scored.
          k_BSKH: keys as scored.
          scale: factor of the scores.
          matrices: W of Hedgehog, "q" `[N, H, H]` and "k" `[K, H, H]`, each x W; None is W = 1.
        """
        if matrices is not None:
            q_BTNH = jnp.einsum("BTNH,NHF->BTNF", q_BTNH, matrices["q"], precision="highest")
            k_BSKH = jnp.einsum("BSKH,KHF->BSKF", k_BSKH, matrices["k"], precision="highest")
        B, T, N, _ = q_BTNH.shape
        S, K = k_BSKH.shape[1:3]
        # The result does not depend on the peaks, so they need no gradient.
        a_BTNF, c_BSKF = self.log_features(q_BTNH, scale), self.log_features(k_BSKH, scale)
        a_BTN1, c_BSK1 = (jax.lax.stop_gradient(x.max(-1, keepdims=True)) for x in (a_BTNF, c_BSKF))
        a_BTKGF = jnp.exp(a_BTNF - a_BTN1).reshape(B, T, K, N // K, -1)
        c_BSKF = jnp.exp(c_BSKF - c_BSK1)
        product = jnp.einsum("BTKGF,BSKF->BKGTS", a_BTKGF, c_BSKF, precision="highest")
        product_BNTS = product.reshape(B, N, T, S)
        some = product_BNTS > 0
        log_BNTS = jnp.where(some, jnp.log(jnp.where(some, product_BNTS, 1)), -jnp.inf)
        peak_BKS = c_BSK1[..., 0].transpose(0, 2, 1)
        peak_BN1S = jnp.repeat(peak_BKS, N // K, axis=1)[:, :, None]
        return log_BNTS + a_BTN1.transpose(0, 2, 1, 3) + peak_BN1S

    def log_weights(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        scale: float,
        scores_BNTS: jax.Array,
        matrices: Mapping[str, jax.Array] | None = None,
        inside_BNTS: jax.Array | None = None,
    ) -> jax.Array:
        """Logarithms `[B, N, T, S]` whose softmax are the rows of weights, -inf at masked keys.

        Args:
          q_BTNH, k_BSKH, scale, matrices: arguments of `scores`.
          scores_BNTS: the model's own scores, -inf where a key is masked.
          inside_BNTS: keys of the window, where keys are in another order than in the text.
        """
        own_BNTS = self.scores(q_BTNH, k_BSKH, scale, matrices)
        kept_BNTS = scores_BNTS != -jnp.inf
        if self.w:
            if inside_BNTS is None:
                inside_BNTS = within(kept_BNTS, self.w, self.sinks)
            z_BNTS = jnp.where(kept_BNTS, scores_BNTS, 0).astype(own_BNTS.dtype)
            if self.kind != "performer":
                # A shift of the scores inside changes nothing, but c moves with the scores, and so
                # it has a gradient.
                top_BNT1 = jnp.where(inside_BNTS, z_BNTS, -jnp.inf).max(-1, keepdims=True)
                z_BNTS -= jnp.where(jnp.isneginf(top_BNT1), 0, top_BNT1)
            own_BNTS = jnp.where(inside_BNTS, z_BNTS + math.log(self.gamma), own_BNTS)
        return jnp.where(kept_BNTS, own_BNTS, -jnp.inf)


@functools.cache
def random_vectors(m: int, width: int, seed: int) -> np.ndarray:
    """`m` vectors of this width in float64, each normally distributed, orthogonal in blocks.

    The first directions of a block are columns of a uniformly distributed rotation: Q of the QR
    decomposition of a normal matrix with the signs of the diagonal of R.
    """
    generator = np.random.default_rng(seed)
    blocks = []
    for start in range(0, m, width):
        q, r = np.linalg.qr(generator.standard_normal((width, width)))
        lengths = np.linalg.norm(generator.standard_normal((width, width)), axis=1)
        blocks.append((lengths[:, None] * (q * np.sign(np.diag(r))).T)[: m - start])
    return np.concatenate(blocks)
