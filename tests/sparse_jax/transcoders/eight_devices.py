"""A transcoder's loss and gradient on eight devices; prints what its test compares, as JSON.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.sparse_jax.transcoders.eight_devices
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model import params as params_lib
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from sparse_jax.transcoders.inputs import Activations
from sparse_jax.transcoders.objective import Penalties, Progress, Transcoding
from sparse_jax.transcoders.thresholds import _quantile_LF
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig, spec
from tests import rounding

L, D, F, X = 2, 8, 16, 24
MESHES = [(1, 1, 8), (2, 1, 4), (2, 2, 2)]
COLLECTIVE = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(-start)?\("
)


def objective_of(kind):
    penalties = Penalties(
        sparsity=0.5,
        dead=0.25,
        ramp=0.5,
        active=2,
        active_start=4,
        silent_steps=2,
        aux=0.5,
        aux_active=1,
    )
    cfg = TranscoderConfig(L, D, F, kind=kind, threshold=0.1)
    return Transcoding(cfg, penalties, steps=10)


def drawn(objective):
    params = params_lib.init(jax.random.key(0), spec(objective.cfg))
    params["encoder_bias"] = 0.1 * jax.random.normal(jax.random.key(1), (L, F))
    x, y = (jax.random.normal(jax.random.key(k), (L, X, D)) for k in (2, 3))
    silent_LF = jnp.zeros((L, F), jnp.int32).at[:, ::3].set(5)
    return params, Activations(x, y, jnp.arange(X) % 7 != 0), Progress(jnp.int32(4), silent_LF)


def thresholds(objective, params, acts, progress):
    """Above what features and dead features are open, in float64; no pre-activation is near."""
    mask = np.asarray(acts.mask_X)
    wide = [np.asarray(a, np.float64) for a in (acts.input_LXD, params["encoder"])]
    pre = np.einsum("lxd,lfd->lxf", *wide) + np.asarray(params["encoder_bias"])[:, None]
    pre = np.where(mask[None, :, None], pre, 0.0)
    dead = np.where(np.asarray(progress.silent_LF)[:, None] >= 2, pre, 0.0)
    kept = float(objective._kept(progress.updates))

    def above(values, per_token):
        ordered = np.sort(values[values > 0])[::-1]
        count = int(np.ceil(per_token * L * mask.sum()))
        return (ordered[count - 1] + ordered[count]) / 2 if count < ordered.size else 0.0

    open_at = above(pre, kept) if objective.cfg.kind == "batchtopk" else 0.1
    aux_at = above(dead, objective.penalties.aux_active)
    counted = pre[:, mask]
    # Sums of D products of numbers of size 1 are exact to 1e-6.
    assert np.abs(counted - open_at).min() > 1e-5 and np.abs(counted - aux_at).min() > 1e-5
    return open_at, aux_at


def written_out(objective, acts, progress, open_at, aux_at, params):
    """The loss with given thresholds, by which a derivative is none."""
    p, model = objective.penalties, Transcoder(params, objective.cfg)
    mask_1X1 = acts.mask_X[None, :, None]
    pre = model.pre_activations(acts.input_LXD)
    z = jnp.where(pre > open_at, pre, 0.0)
    error = jnp.where(mask_1X1, model.decode(z) - acts.output_LXD, 0.0)
    norms = model.decoder_norms()[:, None]
    below = jnp.maximum(model.theta_LF[:, None] - pre, 0.0) * norms
    total = jnp.sum(error**2) + p.dead * jnp.sum(jnp.where(mask_1X1, below, 0.0))
    if objective.cfg.kind != "batchtopk":
        soft = jnp.tanh(p.tanh_scale * z * norms)
        total += 0.8 * p.sparsity * jnp.sum(jnp.where(mask_1X1, soft, 0.0))
    dead = progress.silent_LF[:, None] >= p.silent_steps
    z_dead = jnp.where(dead & mask_1X1 & (pre > aux_at), pre, 0.0)
    missed = model.decode(z_dead) - params["decoder_bias"][:, None] + jax.lax.stop_gradient(error)
    total += p.aux * jnp.sum(jnp.where(mask_1X1, missed, 0.0) ** 2)
    return total / acts.mask_X.sum()


def on_mesh(objective, sizes, params, acts, progress):
    """Loss, gradient and the collectives of the program, as (kind, shape)."""
    mesh = sharding.make_mesh(*sizes)
    places = sharding.param_shardings(mesh, spec(objective.cfg))

    def loss(params, acts):
        return objective.loss(params, acts, progress, acts.mask_X.sum())[0]

    step = jax.jit(
        under_mesh(jax.value_and_grad(loss), mesh),
        in_shardings=(places, sharding.replicated(mesh)),
        out_shardings=(sharding.replicated(mesh), places),
    )
    compiled = step.lower(params, acts).compile()
    found = [(m["kind"], m["shape"]) for m in COLLECTIVE.finditer(compiled.as_text())]
    placed = jax.device_put(acts, sharding.replicated(mesh))
    return compiled(jax.device_put(params, places), placed), found


def quantiles_on_mesh(objective, params, acts):
    """Float arrays of the program that takes quantiles of features, split eight ways."""
    mesh = sharding.make_mesh(tensor=8)
    placed = jax.device_put(params, sharding.param_shardings(mesh, spec(objective.cfg)))
    read = jax.device_put(acts, sharding.replicated(mesh))
    lowered = _quantile_LF.lower(Transcoder(placed, objective.cfg), read, 0.1)
    return re.findall(r"f32\[[\d,]*\]", lowered.compile().as_text())


def without_threshold(loss_and_gradient):
    """The derivative by thresholds is that of a smoothed step, which nothing written out has."""
    loss, gradient = loss_and_gradient
    return loss, {name: leaf for name, leaf in gradient.items() if name != "log_threshold"}


def main():
    """Compares, and prints the collectives by mesh."""
    results = {}
    for kind in ("jumprelu", "batchtopk"):
        objective = objective_of(kind)
        params, acts, progress = drawn(objective)
        at = thresholds(objective, params, acts, progress)
        exact = functools.partial(written_out, objective, acts, progress, *at)
        wanted = rounding.expected(jax.value_and_grad(exact), params)
        for sizes in MESHES:
            got, found = on_mesh(objective, sizes, params, acts, progress)
            trees = (without_threshold(tree) for tree in (got, *wanted))
            got, values, bounds = trees
            rounding.assert_within(got, rounding.Expected(values, bounds), f"{kind}, {sizes}")
            results[f"{kind} {sizes}"] = found
    quantiles = quantiles_on_mesh(objective, params, acts)
    found = {"devices": jax.device_count(), "collectives": results, "quantiles": quantiles}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
