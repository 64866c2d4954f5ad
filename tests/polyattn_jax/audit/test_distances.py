"""Mean distances of heads equal those of all weights in float64, and run where they are named."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.model.config import LayerShape
from lm_jax.run.files import write_json
from lm_jax.run.identity import ModelIdentity
import polyattn_jax
from polyattn_jax.audit import bias_tables, model_calibration
from polyattn_jax.audit.bias_tables import DistanceTable
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.row_maps import parse_recipe
from tests import tiny

TEXTS, LENGTH = 3, 16
GROUPED = dataclasses.replace(tiny.GROUPED, windows=(None, 5))
# Of three layers the last reads the keys of the second.
SHARED = tiny.decoder(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    rope=None,
    layers=(LayerShape(), LayerShape(), LayerShape(kv=1)),
)


def audited_of(cfg, length=LENGTH):
    """What a calibration reads of a model with sharp heads."""
    params = tiny.params(cfg)
    params |= {"blocks": jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, params["blocks"])}
    model = SimpleNamespace(params=params, cfg=cfg, identity=ModelIdentity("a" * 64))
    config = AuditConfig("x", niah_lengths=(length,), sweep_length=length)
    return SimpleNamespace(model=model, config=config, shape=(cfg.num_layers, cfg.num_heads))


@pytest.fixture
def texts_UT(monkeypatch):
    texts_UT = np.random.default_rng(0).integers(0, 40, (TEXTS, LENGTH), np.int32)
    monkeypatch.setattr(model_calibration, "calibration_tokens", lambda _: (texts_UT, (), 0))
    return texts_UT


@pytest.mark.parametrize(
    ("cfg", "together"),
    [
        (GROUPED, [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]),
        (SHARED, [[(0, 0)], [(0, 1)], [(1, 0), (2, 0)], [(1, 1), (2, 1)]]),
    ],
)
def test_distances_are_those_of_all_weights_but_on_the_first_token(
    cfg, together, texts_UT, tmp_path
):
    audited = audited_of(cfg)
    table = bias_tables.distances(audited, tmp_path)
    record = {"attn.scores": lm_jax.keep}
    out = lm_jax.forward(audited.model.params, jnp.asarray(texts_UT), cfg, record=record)
    scores = np.asarray(out.records["attn.scores"], np.float64)
    weights = special.softmax(scores, axis=-1)
    # A score comes out of at most ten products, each a sum of 64 terms or fewer, so that two
    # programs differ by twice as many roundings of the largest; a ratio of sums of weights by four
    # times as much, and 80 roundings of its own.
    apart = 2 * 10 * 64 * 2.0**-24 * np.abs(scores[np.isfinite(scores)]).max()
    bound = np.expm1(4 * apart) + 80 * 2.0**-24
    found = np.array(table.distances)
    assert found.shape == audited.shape and (table.texts, table.length) == (TEXTS, LENGTH)
    for places in together:
        mass = distance = 0.0
        for layer, key_head in places:
            for n in (2 * key_head, 2 * key_head + 1):
                for u, t, s in np.ndindex(TEXTS, LENGTH, LENGTH):
                    if s > 0:
                        mass += weights[layer, u, n, t, s]
                        distance += weights[layer, u, n, t, s] * (t - s)
        rows = TEXTS * LENGTH * 2 * len(places)
        for layer, key_head in places:
            own = slice(2 * key_head, 2 * key_head + 2)
            assert len(set(found[layer, own])) == 1
            np.testing.assert_allclose(found[layer, own], distance / mass, rtol=bound)
            np.testing.assert_allclose(np.array(table.mass)[layer, own], mass / rows, rtol=bound)
    assert len(set(found.ravel().tolist())) == len(together) and (found > 0).all()


def test_a_text_of_one_token_has_no_distance(texts_UT, tmp_path):
    table = bias_tables.distances(audited_of(GROUPED, length=1), tmp_path)
    assert not np.array(table.distances).any() and not np.array(table.mass).any()


def test_a_table_of_other_settings_is_not_taken(tmp_path):
    audited = audited_of(GROUPED)
    numbers = ((1.0,) * 4,) * 2
    table = DistanceTable("a" * 64, LENGTH, TEXTS, numbers, ((0.5,) * 4,) * 2, dtype="float32")
    path = tmp_path / "calibration_distance.json"
    write_json(path, table)
    recipes = {"gdn": parse_recipe("gdn")}
    named = bias_tables.calibrated(audited, tmp_path, recipes)
    np.testing.assert_array_equal(named["distance"], numbers)
    np.testing.assert_array_equal(bias_tables.read(path, audited, "distance"), numbers)
    # There is no budget to compare.
    own = dataclasses.replace(audited.config, budget=0.2)
    assert bias_tables.distances(SimpleNamespace(**vars(audited) | {"config": own}), tmp_path)
    for changes, words in (
        ({"length": 8}, "length is 8, and 16 in this run"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and"),
        ({"model_sha256": "b" * 64}, "another model: weights bbbbbbbbbbbb, not aaaa"),
    ):
        write_json(path, dataclasses.replace(table, **changes))
        with pytest.raises(BadInputError, match=f"{words}.*remove the file to calibrate again"):
            bias_tables.distances(audited, tmp_path)
    with pytest.raises(BadInputError, match="or measure one by --recipe=gdn"):
        bias_tables.read(path, audited, "distance")
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"distances": [[-1.0] * 4] * 2}))
    with pytest.raises(CorruptError, match="distances must be 0 or more"):
        bias_tables.read(path, audited, "distance")
    # Two query heads of one key head, whose memory has one decay.
    own = {"model_sha256": audited.model.identity.text}
    path.write_text(json.dumps(held | own | {"distances": [[1.0, 1.0, 2.0, 2.5]] * 2}))
    with pytest.raises(BadInputError, match="heads of layer 0 that read one key head"):
        bias_tables.read(path, audited, "distance")
    # A file of biases is no file of distances, whatever read it before.
    path.write_text(json.dumps(held))
    spec = f"gdn:distance={path}"
    with pytest.raises(CorruptError):
        bias_tables.calibrated(audited, tmp_path, {"relu": parse_recipe(f"relu:p=2,b={path}")})
    assert bias_tables.digests({"gdn": parse_recipe("gdn")}) == []
    assert len(bias_tables.digests({"gdn": parse_recipe(spec)})) == 1


def test_a_check_measures_distances_and_says_that_s_is_not_defined(run_check, tiny, tmp_path):
    outcome = run_check("--recipe=gdn", "--top_heads=3", f"--workdir={tmp_path / 'run'}")
    assert outcome.code in (10, 11), outcome.err
    words = " ".join(outcome.out.split())
    assert "S is not defined for this map, whose weights may be negative" in words
    assert "a state of 256 numbers per KV head" in words
    path = tmp_path / "run" / "calibration_distance.json"
    held = json.loads(path.read_text())
    first = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert first["bias"] == held["distances"] and not first["measured"]
    assert re.search(r"\nmean distance, tokens +[0-9.]+ to [0-9.]+ by head\n", outcome.out)
    again = run_check(f"--recipe=gdn:distance={path}", f"--workdir={tmp_path / 'again'}")
    second = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again.code == outcome.code and second["bias"] == first["bias"]
    for name in ("verdict", "dead_rows_per_prompt"):
        assert [task[name] for task in first["tasks"]] == [task[name] for task in second["tasks"]]
    # Saved heads run with the distances of the file.
    model = lm_jax.load_pretrained(tiny)
    heads = {
        "version": 1,
        "model": "tiny",
        "model_sha256": model.sha256,
        "recipe": "gdn",
        "bias": first["bias"],
        "layers": 3,
        "heads": 4,
        "replaced": [[layer, n] for layer in range(3) for n in range(4)],
    }
    saved = tmp_path / "heads.json"
    saved.write_text(json.dumps(heads))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 12)))
    logits = [
        lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend).logits
        for attend in (
            polyattn_jax.load_recipe(saved, model),
            polyattn_jax.recipe("gdn", bias=np.array(first["bias"])),
        )
    ]
    np.testing.assert_array_equal(*logits)
