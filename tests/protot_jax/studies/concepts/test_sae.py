"""The small autoencoder finds the directions that activations were made of."""

import jax
import numpy as np
import pytest

from lm_jax.errors import UsageError
from protot_jax.studies.concepts import sae


def test_it_finds_the_directions_of_synthetic_activations():
    """Activations are an offset and two of six orthogonal directions, at strengths of 1 to 2."""
    rng = np.random.default_rng(0)
    directions_FD = np.linalg.qr(rng.normal(size=(8, 8)))[0][:6]
    chosen = np.argsort(rng.random((4_096, 6)), axis=1)[:, :2]
    strength_MF = np.zeros((4_096, 6))
    np.put_along_axis(strength_MF, chosen, rng.uniform(1.0, 2.0, chosen.shape), axis=1)
    x_MD = np.float32(3.0 + strength_MF @ directions_FD)
    with jax.default_matmul_precision("highest"):
        found = sae.train(x_MD[:3_072], features=6, seed=1, active=2, steps=1_000)
        held_out = x_MD[3_072:]
        assert sae.unexplained(found, held_out) < 0.02
        features_MF = np.asarray(found.encode(held_out))
    cosine = np.asarray(found.decoder_FD) @ directions_FD.T
    # Each direction is one feature's, and no two are of the same.
    best = cosine.argmax(0)
    assert sorted(best) == list(range(6)) and (cosine.max(0) > 0.95).all()
    assert ((features_MF > 0).sum(1) <= 2).all()
    wanted = strength_MF[3_072:] > 0
    assert ((features_MF[:, best] > 0) == wanted).mean() > 0.98


def test_as_many_features_as_are_active_are_needed():
    with pytest.raises(UsageError, match="3 features are fewer than the 8"):
        sae.train(np.zeros((4, 2)), features=3, seed=0)
