"""Router statistics against plain loops, and where they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.spatial.distance import jensenshannon

import lm_jax
from lm_jax import sharding
from lm_jax.train.metrics import EVALUATIONS
import protot_jax
from protot_jax import router


def _model():
    cfg, mixer = protot_jax.make(
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
    """Rows `[N, T]` in batches, as `lm_jax.train.data.OnePass` gives them."""

    fingerprint = "rows"

    def __init__(self, tokens_NT, batch_size):
        self.per_epoch = -(-len(tokens_NT) // batch_size)
        padded = np.pad(tokens_NT, ((0, self.per_epoch * batch_size - len(tokens_NT)), (0, 1)))
        self._batches = np.split(padded.astype(np.int32), self.per_epoch)

    def at(self, k):
        return {"tokens": self._batches[k]}


def _statistics(cfg, mixer, tokens_NT, *, batch_size):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return router.router_statistics(cfg, mixer, Rows(tokens_NT, batch_size), mesh)


def test_statistics_are_those_of_a_loop_over_tokens():
    cfg, mixer, params = _model()
    tokens_NT = np.random.default_rng(0).integers(1, 20, (3, 9))
    tokens_NT[1, 6:] = 0
    # Two batches, of which the second is filled up with a row of padding.
    found = _statistics(cfg, mixer, tokens_NT, batch_size=2)(params, 0)
    keep = dict.fromkeys(("mixer.write", "mixer.read", "mixer.write_logits"), lm_jax.sites.keep)
    records = lm_jax.forward(
        params,
        jnp.asarray(tokens_NT),
        cfg,
        mixer=mixer,
        record=keep,
        valid_BT=jnp.asarray(tokens_NT != 0),
    ).records
    own = params["blocks"]["mixer"]
    for layer in range(2):
        write, read = (np.float64(records[f"mixer.{name}"][layer]) for name in ("write", "read"))
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
            "write_dead": 0,
            "write_logit_std": np.std(
                np.asarray(records["mixer.write_logits"])[layer][tokens_NT != 0]
            ),
            "half_life_median": np.log(0.5) / np.log(0.9),
            "alpha": 1.0,
            "write_tau": 3.0 if layer == 0 else 1.0,
            "prototype_norm": 1.0,
            "value_norm": np.sqrt(np.sum(np.square(own["value"][layer], dtype=np.float64))),
        }
        for name, value in want.items():
            assert found[f"layer_{layer}/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    # The first layer reads with its write gate.
    assert found["layer_0/js_read_write"] == pytest.approx(0, abs=1e-9)


def test_a_prototype_that_fires_only_in_the_last_row_is_not_dead():
    """Statistics of the first rows alone would count it as dead."""
    cfg, mixer, params = _model()
    # Nearly hard routing: in the first layer a token alone decides what it writes to.
    own = params["blocks"]["mixer"]
    own["write_tau"] = jnp.full_like(own["write_tau"], 1e-3)
    tokens = np.arange(1, 20)
    forward = lm_jax.forward(
        params, tokens[None], cfg, mixer=mixer, record={"mixer.write": lm_jax.sites.keep}
    )
    wins_T = np.asarray(forward.records["mixer.write"])[0, 0].argmax(-1)
    rare = np.bincount(wins_T, minlength=5)
    rare = min((r for r in range(5) if rare[r]), key=rare.__getitem__)
    tokens_NT = np.random.default_rng(0).choice(tokens[wins_T != rare], (40, 9))
    without = _statistics(cfg, mixer, tokens_NT, batch_size=8)(params, 0)
    tokens_NT[-1, 4] = tokens[wins_T == rare][0]
    found = _statistics(cfg, mixer, tokens_NT, batch_size=8)(params, 0)
    name = "layer_0/write_dead"
    assert found[name] == 5 - len(set(wins_T.tolist()))
    assert without[name] == found[name] + 1


def test_disjoint_gates_are_ln_2_apart():
    one, other = jnp.eye(2)[None, 0], jnp.eye(2)[None, 1]
    assert router.jensen_shannon(one, other) == pytest.approx(np.log(2))
    assert router.jensen_shannon(one, one) == 0


def test_a_run_writes_them_at_every_evaluation_and_as_events(run):
    folder = run / "seed_1"
    rows = pq.read_table(folder / EVALUATIONS).to_pylist()
    taus = [(row["step"], row["value"]) for row in rows if row["name"] == "layer_0/write_tau"]
    assert [step for step, _ in taus] == [2, 4]
    model = protot_jax.load_run(run, best=False)
    assert taus[-1][1] == pytest.approx(float(model.params["blocks"]["mixer"]["write_tau"][0]))
    (events,) = (folder / "tensorboard").iterdir()
    written = events.read_bytes()
    for name in (b"layer_1/mass", b"train/loss", b"validation/perplexity"):
        assert name in written
