"""Exported sparse models in torch: logits, patterns and open edges are those of ours.

Both are compared with the definition of gates in a model of float64, within the rounding errors of
float32; within those no gate is in doubt, so that the open edges are equal one by one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.attention.rows import over_sum, softmax
import lm_jax
from lm_jax.assets import published
from lm_jax.model.attention import PerLayer
import sparse_jax
from sparse_jax import torch_gates
from sparse_jax.gates import model as sparse_model
from tests import rounding
from tests.lm_jax.weights.test_bfloat16_parity import AS_EXACT, errors_of
from tools import make_goldens

pytestmark = pytest.mark.torch

CASES = sorted(make_goldens.CASES)
# Every exported sparse model that comes with the repository.
SHIPPED = [
    name for name in published.names() if (published.resolve(name) / sparse_model.SPARSE).is_file()
]
TEXT = (
    "Then, Mary and John went to the park. John gave a book to Mary, who was born in 1898 in "
    "Paris. The album was released by the band in May of the year after."
)
LONG, SHORT = 42, 17
KINDS = {"scaled": (False, False), "raw, renormalised": (True, True)}
# The second kind in a few: with biases, grouped keys, partial rotation, and capped scores, where
# q.k is no multiple of the score.
FAMILIES = [(case, "scaled") for case in CASES] + [
    (case, "raw, renormalised") for case in ("gpt2", "llama_gqa", "neox", "gemma2")
]


def exported(case, folder, raw_gate=False, renormalise=False, bias_LN=None):
    """A folder of the tiny model of a family with gates of which about half are open."""
    base = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    shape = base.cfg.num_layers, base.cfg.num_heads
    if bias_LN is None:
        bias_LN = 0.5 * np.random.default_rng(4).normal(size=shape).astype(np.float32)
    gates = sparse_model.Gates(bias_LN, raw_gate, renormalise)
    sparse_model.save(folder / "model", base, gates, {})
    return folder / "model"


def gated(scores_BNTS, bias_N, visible_BNTS, *, raw=None, renormalise=False):
    """Pattern and open edges by the definition of gates; `raw` are q.k, for a raw gate alone."""
    own_BNTS = jnp.where(visible_BNTS, scores_BNTS, 0.0) if raw is None else raw
    open_BNTS = visible_BNTS & (own_BNTS + bias_N[None, :, None, None] > 0)
    scores_BNTS = jnp.where(visible_BNTS, scores_BNTS, -jnp.inf)
    pattern_BNTS = jnp.where(open_BNTS, softmax(scores_BNTS), 0.0)
    return over_sum(pattern_BNTS) if renormalise else pattern_BNTS, open_BNTS


def defined(model, params, tokens_BT, valid_BT):
    """Logits, patterns and counts of edges by the definition of gates, as a plain attend."""
    cfg, gates = model.cfg, model.gates

    def attend(scores_BNTS, bias_N):
        visible_BNTS = jnp.isfinite(scores_BNTS) & valid_BT[:, None, :, None]
        raw_BNTS = None
        if gates.raw_gate:
            raw_BNTS = jnp.where(visible_BNTS, scores_BNTS, 0.0)
            if (cap := cfg.score_softcap) is not None:
                raw_BNTS = 0.5 * cap * jnp.log((cap + raw_BNTS) / (cap - raw_BNTS))
            raw_BNTS = raw_BNTS / cfg.scale
        pattern_BNTS, open_BNTS = gated(
            scores_BNTS, bias_N, visible_BNTS, raw=raw_BNTS, renormalise=gates.renormalise
        )
        counts = {"open": open_BNTS.sum((2, 3)), "pairs": visible_BNTS[:, 0].sum((1, 2))}
        return pattern_BNTS, counts

    output = lm_jax.forward(
        params,
        tokens_BT,
        cfg,
        attend=PerLayer(attend, jnp.asarray(gates.bias_LN)),
        valid_BT=valid_BT,
        record={"attn.pattern": lm_jax.keep},
    )
    logits = jnp.where(valid_BT[:, :, None], output.logits, 0.0)
    return logits, output.records["attn.pattern"], output.aux["open"], output.aux["pairs"]


def ours(model, tokens_BT, valid_BT):
    """Logits and counts of the sparse model of ours."""
    output = model.forward(tokens_BT, valid_BT=valid_BT)
    logits = jnp.where(valid_BT[:, :, None], output.logits, 0.0)
    return logits, output.aux["open_edges_BN"], output.aux["pairs_B"]


def theirs(model, gates, tokens_BT, valid_BT=None):
    """The same of torch, and the open edges `[L, B, N, T, S]`."""
    import torch

    gates.keep_masks = True
    padding = {} if valid_BT is None else {"attention_mask": torch.tensor(valid_BT).long()}
    with torch.no_grad():
        output = model(torch.tensor(tokens_BT), output_attentions=True, **padding)
    logits = output.logits.float().numpy()
    if valid_BT is not None:
        logits = np.where(valid_BT[:, :, None], logits, 0.0)
    pattern_LBNTS = np.stack([each.float().numpy() for each in output.attentions])
    counts = gates.open_edges_LBN.numpy(), gates.pairs_LB.numpy()
    open_LBNTS = np.stack([each.numpy() for each in gates.open_LBNTS])
    return (logits, pattern_LBNTS, *counts), open_LBNTS


def assert_parity(folder, tokens_BT, valid_BT=None, doubtful=False):
    sparse = sparse_jax.load(folder)
    result, open_LBNTS = theirs(*torch_gates.load(folder), tokens_BT, valid_BT)
    whole_BT = np.ones(tokens_BT.shape, bool)
    given = jnp.asarray(tokens_BT), jnp.asarray(whole_BT if valid_BT is None else valid_BT)
    exact = rounding.expected(lambda params: defined(sparse, params, *given), sparse.params)
    rounding.assert_within(result, exact, "torch's")
    own = rounding.Expected(*((x[0], x[2], x[3]) for x in exact))
    rounding.assert_within(ours(sparse, *given), own, "ours")
    # Where no gate is in doubt the open edges are equal; some are open and some closed.
    _, pattern_LBNTS, counts_LBN, pairs_LB = exact.values
    doubt_LBN = exact.bounds[2]
    assert doubtful or not doubt_LBN.any()
    assert (doubt_LBN == 0).mean() >= 0.5
    assert ((open_LBNTS != (pattern_LBNTS > 0)).sum((3, 4)) <= doubt_LBN).all()
    np.testing.assert_array_equal(open_LBNTS.sum((3, 4)), result[2])
    share = counts_LBN.sum() / (pairs_LB.sum() * sparse.cfg.num_heads)
    assert 0.01 < share < 0.8


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_the_same_in_torch(name):
    """One row is half as long as the other, and padded at its end."""
    ids = sparse_jax.load(name).base.tokenizer.encode(TEXT)[:LONG]
    assert len(ids) == LONG
    tokens_BT = np.array([ids, ids[::-1]])
    valid_BT = np.arange(LONG) < np.array([[LONG], [SHORT]])
    # Its q.k are tens without their scale, so that some gates are within their roundings.
    doubtful = name == "stories15m_sparse"
    assert_parity(published.resolve_model(name), tokens_BT, valid_BT, doubtful=doubtful)


@pytest.mark.parametrize(("case", "kind"), FAMILIES)
def test_every_family_is_the_same_in_torch(case, kind, tmp_path):
    """Grouped keys, windows, capped scores, shared keys and rotations by length among them."""
    # Bounds widen through six layers without a scale, and gates of a few heads are in doubt.
    folder, doubtful = exported(case, tmp_path, *KINDS[kind]), case == "gemma4"
    assert_parity(folder, make_goldens.TOKENS_BT, doubtful=doubtful)


@pytest.mark.parametrize("case", ["llama_gqa", "neox", "qwen3", "gemma2"])
def test_a_model_in_bfloat16_is_as_exact_as_ours(case, tmp_path):
    """Of gates that rounding does not move: in every other head all are closed."""
    import torch

    cfg = lm_jax.load_pretrained(make_goldens.GOLDEN / case).cfg
    bias_LN = np.where(np.indices((cfg.num_layers, cfg.num_heads)).sum(0) % 2, 50.0, -50.0)
    folder = exported(case, tmp_path, bias_LN=bias_LN.astype(np.float32))
    sparse = sparse_jax.load(folder, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), sparse.params)
    given = jnp.asarray(make_goldens.TOKENS_BT), jnp.ones(make_goldens.TOKENS_BT.shape, bool)
    exact = rounding.expected(lambda params: defined(sparse, params, *given)[:1], wide)
    model, gates = torch_gates.load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    result, open_LBNTS = theirs(model, gates, make_goldens.TOKENS_BT)
    (own,) = errors_of(ours(sparse, *given)[:1], exact)
    (other,) = errors_of(result[:1], exact)
    assert 0.0 < other < AS_EXACT * own
    open_LN = open_LBNTS.any((1, 3, 4))
    np.testing.assert_array_equal(open_LN, bias_LN > 0)
