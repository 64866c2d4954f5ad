"""Router statistics against plain loops, and where they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.spatial.distance import jensenshannon

import lm_jax
from lm_jax.parallel import sharding
from lm_jax.text.examples import OnePass
from lm_jax.train.metrics import EVALUATIONS
from lm_jax.train.objective import PackedBatch
import protot_jax
from protot_jax.training import router, saved_run
from tests import rounding

U = 2.0**-24


def _model():
    cfg, mixer = protot_jax.build_model(
        "protot",
        hidden_size=16,
        num_layers=2,
        vocab_size=20,
        context=9,
        tie_embeddings=True,
        num_prototypes=5,
    )
    return cfg, mixer, lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)


class Rows:
    """Rows `[N, T]` in batches, as `lm_jax.text.examples.OnePass` gives them."""

    fingerprint = "rows"

    def __init__(self, tokens_NT, batch_size):
        self.per_epoch = -(-len(tokens_NT) // batch_size)
        padded = np.pad(tokens_NT, ((0, self.per_epoch * batch_size - len(tokens_NT)), (0, 1)))
        self._batches = np.split(padded.astype(np.int32), self.per_epoch)

    def at(self, k):
        return {"tokens": self._batches[k]}


def _statistics(cfg, mixer, tokens_NT, *, batch_size, **options):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return router.router_statistics(cfg, mixer, Rows(tokens_NT, batch_size), mesh, **options)


def formulas(cfg, mixer, tokens_NT):
    """What depends on gates, `[L]` by name, as a function of the parameters; and the records."""
    valid_NT = jnp.asarray(tokens_NT != 0)
    keep = dict.fromkeys(
        ("mixer.write", "mixer.read", "mixer.write_logits"), lm_jax.model.sites.keep
    )

    def run(params):
        tokens = jnp.asarray(tokens_NT)
        records = lm_jax.forward(
            params, tokens, cfg, mixer=mixer, record=keep, valid_BT=valid_NT
        ).records
        write_LNTR, read_LNTR = records["mixer.write"], records["mixer.read"]
        decay_LR = jax.nn.sigmoid(params["blocks"]["mixer"]["decay_logit"])

        def mean(x_LNT):
            return jnp.sum(jnp.where(valid_NT[None], x_LNT, 0.0), (1, 2)) / valid_NT.sum()

        def later(total_LNR, write_LNR):
            return decay_LR[:, None] * (total_LNR + write_LNR), total_LNR

        steps_TLNR = jnp.moveaxis(write_LNTR, 2, 0)
        _, total_TLNR = jax.lax.scan(later, jnp.zeros_like(steps_TLNR[0]), steps_TLNR)
        # Padding has no gates.
        sums_LNTR = jnp.where(valid_NT[None, :, :, None], write_LNTR + read_LNTR, 1.0)
        apart_LNTR = (write_LNTR - read_LNTR) / sums_LNTR
        log_write, log_read = jnp.log1p(apart_LNTR), jnp.log1p(-apart_LNTR)
        divergence_LNT = (write_LNTR * log_write + read_LNTR * log_read).sum(3) / 2
        share_LR = write_LNTR.sum((1, 2)) / valid_NT.sum()
        gaps_L = jnp.abs(share_LR[:, :, None] - share_LR[:, None]).sum((1, 2))
        logits_LNTR = records["mixer.write_logits"]
        centre_L = mean(logits_LNTR.mean(3))
        squares_L = mean(((logits_LNTR - centre_L[:, None, None, None]) ** 2).mean(3))
        results = {
            "mass": mean(jnp.moveaxis(total_TLNR, 0, 2).mean(3)),
            "js_read_write": mean(divergence_LNT),
            "read_top_1": mean(read_LNTR.max(3)),
            "write_gini": gaps_L / (2 * share_LR.shape[1] * share_LR.sum(1)),
            "write_max_share": share_LR.max(1),
            "write_logit_std": jnp.sqrt(squares_L),
        }
        return results, records

    return run


def test_statistics_are_those_of_a_loop_over_tokens():
    cfg, mixer, params = _model()
    tokens_NT = np.random.default_rng(0).integers(1, 20, (3, 9))
    tokens_NT[1, 6:] = 0
    # Two batches, of which the second is filled up with a row of padding.
    result = _statistics(cfg, mixer, tokens_NT, batch_size=2)(params, 0)
    (exact, records), (bounds, off) = rounding.expected(formulas(cfg, mixer, tokens_NT), params)
    own = params["blocks"]["mixer"]
    for layer in range(2):
        write, read = (records[f"mixer.{name}"][layer] for name in ("write", "read"))
        decay = 1 / (1 + np.exp(-np.float64(own["decay_logit"][layer])))
        masses, divergences, largest, rows = [], [], [], []
        for row, ids in enumerate(tokens_NT):
            total = np.zeros(5)
            for i, token in enumerate(ids):
                if token:
                    masses.append(total.mean())
                    divergences.append(jensenshannon(write[row, i], read[row, i]) ** 2)
                    largest.append(read[row, i].max())
                    rows.append(write[row, i])
                total = decay * (total + write[row, i])
        share = np.mean(rows, 0)
        gaps = np.abs(share[:, None] - share[None]).sum() / (2 * 5 * share.sum())
        want = {
            "mass": np.mean(masses),
            "js_read_write": np.mean(divergences),
            "read_top_1": np.mean(largest),
            "write_gini": gaps,
            "write_max_share": share.max(),
            "write_logit_std": np.std(records["mixer.write_logits"][layer][tokens_NT != 0]),
        }
        for name, value in want.items():
            # Both in float64; scipy's divergence is a difference of logarithms.
            np.testing.assert_allclose(exact[name][layer], value, rtol=1e-12, atol=1e-15)
            wanted = rounding.Expected(exact[name][layer], bounds[name][layer])
            rounding.assert_within(result[f"layer_{layer}/{name}"], wanted, name)
        assert result[f"layer_{layer}/write_dead"] == 0
        # As they are made: numbers, and vectors of length 1 in float32, of 16 entries.
        assert result[f"layer_{layer}/alpha"] == 1.0
        assert result[f"layer_{layer}/write_tau"] == (3.0 if layer == 0 else 1.0)
        assert result[f"layer_{layer}/prototype_norm"] == pytest.approx(1.0, rel=40 * U)
        # A logarithm of 0.9 and 0.1, and their difference.
        half_life = np.log(0.5) / np.log(0.9)
        assert result[f"layer_{layer}/half_life_median"] == pytest.approx(half_life, rel=16 * U)
        value = np.float64(own["value"][layer])
        norm = np.sqrt(np.square(value).sum())
        assert result[f"layer_{layer}/value_norm"] == pytest.approx(norm, rel=value.size * U)
    # The first layer reads with its write gate. Computed twice, the two may be apart by their
    # rounding, whose square the divergence is, and it rounds by so much of that a few times.
    write, its_off = (each["mixer.write"][0][tokens_NT != 0] for each in (records, off))
    apart = 2 * (its_off / write).max()
    assert 0 <= result["layer_0/js_read_write"] <= apart * (apart + 16 * U)


def test_a_prototype_that_fires_only_in_the_last_row_is_not_dead():
    """Statistics of the first rows alone would count it as dead."""
    cfg, mixer, params = _model()
    # Nearly hard routing: in the first layer a token alone decides what it writes to.
    own = params["blocks"]["mixer"]
    own["write_tau"] = jnp.full_like(own["write_tau"], 1e-3)
    tokens = np.arange(1, 20)
    forward = lm_jax.forward(
        params, tokens[None], cfg, mixer=mixer, record={"mixer.write": lm_jax.model.sites.keep}
    )
    wins_T = np.asarray(forward.records["mixer.write"])[0, 0].argmax(-1)
    rare = np.bincount(wins_T, minlength=5)
    rare = min((r for r in range(5) if rare[r]), key=rare.__getitem__)
    tokens_NT = np.random.default_rng(0).choice(tokens[wins_T != rare], (40, 9))
    without = _statistics(cfg, mixer, tokens_NT, batch_size=8)(params, 0)
    tokens_NT[-1, 4] = tokens[wins_T == rare][0]
    result = _statistics(cfg, mixer, tokens_NT, batch_size=8)(params, 0)
    name = "layer_0/write_dead"
    assert result[name] == 5 - len(set(wins_T.tolist()))
    assert without[name] == result[name] + 1


def test_statistics_of_packed_rows_are_those_of_their_documents():
    cfg, mixer, params = _model()
    rng, end = np.random.default_rng(0), 4
    documents = [np.append(rng.integers(5, 20, n - 1), end) for n in (5, 4, 3, 6)]
    packed_NT = np.stack([np.concatenate(documents[:2]), np.concatenate(documents[2:])])
    padded_NT = np.stack([np.pad(ids, (0, 9 - len(ids))) for ids in documents])
    packed = _statistics(cfg, mixer, packed_NT, batch_size=2, make_batch=PackedBatch(end))
    apart = _statistics(cfg, mixer, padded_NT, batch_size=2)(params, 0)
    # Sums over 18 tokens, of gates after two layers.
    assert packed(params, 0) == pytest.approx(apart, rel=18 * 64 * U)
    joined = _statistics(cfg, mixer, packed_NT, batch_size=2)(params, 0)
    assert joined["layer_0/mass"] > 1.2 * apart["layer_0/mass"]


def test_disjoint_gates_are_ln_2_apart():
    one, other = jnp.eye(2)[None, 0], jnp.eye(2)[None, 1]
    # log1p, two products, a sum and a half.
    assert router.jensen_shannon(one, other) == pytest.approx(np.log(2), rel=12 * U)
    assert router.jensen_shannon(one, one) == 0


def test_a_run_writes_them_at_every_evaluation_and_as_events(run):
    folder = run / "seed_1"
    rows = pq.read_table(folder / EVALUATIONS).to_pylist()
    taus = [(row["step"], row["value"]) for row in rows if row["name"] == "layer_0/write_tau"]
    norms = {row["name"]: row["value"] for row in rows if row["name"].startswith("train/grad_norm")}
    assert norms["train/grad_norm/mixer/prototypes"] > 0
    assert [step for step, _ in taus] == [2, 4]
    model = protot_jax.load_run(run, best=False)
    assert taus[-1][1] == float(model.params["blocks"]["mixer"]["write_tau"][0])
    # Of every validation row, of which there is more than one batch.
    data = saved_run.load_data(model.config, run / "data")
    mesh = sharding.make_mesh(*model.config.mesh)
    whole = OnePass(data.validation, batch_size=model.config.batch_size)
    assert whole.per_epoch > 1
    expected = router.router_statistics(model.cfg, model.mixer, whole, mesh)(model.params)
    last = {row["name"]: row["value"] for row in rows if row["step"] == 4}
    for name in ("layer_1/write_gini", "layer_1/mass"):
        assert last[name] == float(expected[name])
    (events,) = (folder / "tensorboard").iterdir()
    written = events.read_bytes()
    for name in (b"layer_1/mass", b"train/loss", b"validation/perplexity"):
        assert name in written
