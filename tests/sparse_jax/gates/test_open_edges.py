"""The table of open edges is the open part of recorded attention patterns, and is drawn whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.weights.load import Pretrained
from sparse_jax.circuits.edge_graph import draw_open_edges
from sparse_jax.gates import open_edges as module
from sparse_jax.gates.attend import by_kernels, listing_edges
from sparse_jax.gates.model import Gates, SparseModel
from tests import rounding, tiny

# Grouped queries, and windows that differ by layer.
CFG = tiny.decoder(vocab_size=32, max_length=24, num_heads=4, num_kv_heads=2, windows=(6, None))
TOKENS_BT = np.random.default_rng(0).integers(0, 32, (3, 11))
LENGTHS = np.array([11, 4, 8])
VALID_BT = np.arange(11)[None] < LENGTHS[:, None]
PATTERN = "attn.pattern"


@pytest.fixture(scope="module")
def model():
    # Larger than initial ones, so that scores differ from 0; the bias closes half of the gates.
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(0), CFG))
    bias_LN = np.linspace(-0.6, 0.2, 8, dtype=np.float32).reshape(2, 4)
    return SparseModel(Pretrained(CFG, params, None, ()), Gates(bias_LN), {})


@pytest.fixture(scope="module")
def table(model):
    return model.open_edges(jnp.asarray(TOKENS_BT), valid_BT=jnp.asarray(VALID_BT))


@pytest.fixture(scope="module")
def wanted(model):
    """Recorded patterns with open gates, `[L, B, N, T, S]`, and the bounds of their rounding."""

    def pattern(params):
        run = model.with_params(params).forward(
            jnp.asarray(TOKENS_BT), valid_BT=jnp.asarray(VALID_BT), record={PATTERN: lm_jax.keep}
        )
        return run.records[PATTERN]

    return rounding.expected(pattern, model.params)


def test_the_table_is_the_open_part_of_the_patterns(table, wanted):
    pattern_LBNTS = wanted.values
    # In order of row, layer, head, query and key, as numpy lists them.
    batch, layer, head, query, key = np.nonzero(pattern_LBNTS.swapaxes(0, 1))
    assert table.schema.equals(module.SCHEMA)
    places = {"batch": batch, "layer": layer, "head": head, "query": query, "key": key}
    for name, values in places.items():
        np.testing.assert_array_equal(table[name], values, err_msg=name)
    at = layer, batch, head, query, key
    rounding.assert_within(np.asarray(table["weight"]), rounding.Expected(*(x[at] for x in wanted)))
    # Neither all are open nor none, and no padding reads.
    pairs = 4 * sum(
        min(t + 1, w) for w in (6, 99) for length in LENGTHS.tolist() for t in range(length)
    )
    assert 0.2 < table.num_rows / pairs < 0.8
    assert (query < LENGTHS[batch]).all()


def test_the_lists_are_as_long_as_the_layer_with_most_edges_and_grow_when_more_open(
    model, table, monkeypatch
):
    """As if rounding had opened gates that the first pass counted as closed."""
    run, lengths = module._aux, []

    def recounted(params, tokens_BT, attend, *rest):
        aux = run(params, tokens_BT, attend, *rest)
        lengths.append(attend.fn.edge_capacity)
        return aux | {"open_edges_BN": aux["open_edges_BN"] // 8} if len(lengths) == 1 else aux

    monkeypatch.setattr(module, "_aux", recounted)
    again = model.open_edges(jnp.asarray(TOKENS_BT), valid_BT=jnp.asarray(VALID_BT))
    assert again.equals(table)
    most = np.bincount(np.asarray(table["layer"])).max()
    first, short, long = lengths
    assert first is None and short < most <= long < 2 * most


def test_one_row_needs_no_batch_and_closed_gates_list_nothing(model, table):
    alone = model.open_edges(jnp.asarray(TOKENS_BT[:1]))
    own = table.filter(pa.compute.equal(table["batch"], 0)).drop_columns(["batch"])
    assert alone.column_names == ["layer", "head", "query", "key", "weight"]
    assert alone.drop_columns(["weight"]).equals(own.drop_columns(["weight"]))
    closed = SparseModel(model.base, Gates(np.full((2, 4), -1e4, np.float32)), {})
    assert closed.open_edges(jnp.asarray(TOKENS_BT[:1])).num_rows == 0


def test_edges_are_not_listed_where_they_would_be_a_part(model):
    """Under a mesh each device would list its own rows, and on scores there is no list."""
    attend = listing_edges(model.gates.attend(CFG), 64)
    mesh = sharding.make_mesh(data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    tokens_BT = jnp.asarray(TOKENS_BT[:2])

    def run(tokens_BT, attend):
        return lm_jax.forward(model.params, tokens_BT, CFG, attend=attend).aux

    with pytest.raises(UsageError, match="a mesh splits the rows or heads"):
        jax.eval_shape(under_mesh(run, mesh), tokens_BT, by_kernels(attend))
    with pytest.raises(UsageError, match="only kernels list edges"):
        jax.eval_shape(run, tokens_BT, attend)


def test_a_drawing_holds_the_edges_of_the_table(table):
    tokens = [f"t{place}" for place in range(11)]
    fields = ["layer", "head", "query", "key", "weight"]
    for layer in (None, 1):
        chart = draw_open_edges(table, tokens, batch=2, layer=layer)
        rows = [
            row for row in table.to_pylist() if row["batch"] == 2 and layer in (None, row["layer"])
        ]
        values = chart.data.values
        assert [{name: row[name] for name in fields} for row in values] == [
            {name: row[name] for name in fields} for row in rows
        ]
        for row in values:
            # A line leads from the key up to the query.
            assert (row["from"], row["below"]) == (row["key"], row["layer"])
            assert (row["to"], row["above"]) == (row["query"], row["layer"] + 1)
            assert row["token"] == f"t{row['key']} ({row['key']})"
        # Altair checks it against the schema of Vega-Lite.
        (lines,) = chart.to_dict()["layer"]
        places = [lines["encoding"][name]["field"] for name in ("x", "y", "x2", "y2", "size")]
        assert places == ["from", "below", "to", "above", "weight"]
        assert chart.usermeta["n"] == f"{len(rows)} edges" and len(rows) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["a"] * 11}, "name one by batch="),
        ({"tokens": ["a"] * 3, "batch": 0}, "position 10, and tokens has 3 texts"),
    ],
)
def test_a_drawing_names_what_it_lacks(table, options, message):
    with pytest.raises(UsageError, match=message):
        draw_open_edges(table, **options)
    many = pa.concat_tables([table.filter(pa.compute.equal(table["batch"], 0))] * 400)
    with pytest.raises(UsageError, match="too many for a page of at most 20,000"):
        draw_open_edges(many, ["a"] * 11, batch=0)


@pytest.mark.parametrize("method", ["open_edges", "forward"])
def test_a_row_without_a_batch_axis_is_refused_in_a_sentence(model, method):
    with pytest.raises(UsageError, match=r"tokens_BT has shape \(11,\); give rows of ids \[B, T\]"):
        getattr(model, method)(jnp.asarray(TOKENS_BT[0]))


def test_a_forward_pass_takes_the_mode_of_its_gates(model):
    """Over an open edge the weight is the threshold's; expected, it is times the probability."""
    tokens = jnp.asarray(TOKENS_BT)
    record = {PATTERN: lm_jax.keep, "attn.scores": lm_jax.keep}
    runs = {
        "threshold": model.forward(tokens, record=record),
        "expected": model.forward(tokens, mode="expected", record=record),
        "sample": model.forward(tokens, mode="sample", key=jax.random.key(0), record=record),
    }
    pattern = {mode: np.asarray(run.records[PATTERN], np.float64)[0] for mode, run in runs.items()}
    logit_BNTS = np.asarray(runs["threshold"].records["attn.scores"], np.float64)[0]
    logit_BNTS = logit_BNTS + np.asarray(model.gates.bias_LN)[0, :, None, None]
    open_BNTS = pattern["threshold"] > 0
    # Of the first layer, which reads the same in all of them.
    share = pattern["expected"][open_BNTS] / pattern["threshold"][open_BNTS]
    np.testing.assert_allclose(share, 1 / (1 + np.exp(-logit_BNTS[open_BNTS])), rtol=1e-5)
    assert (pattern["sample"][~open_BNTS] > 0).any() and (pattern["sample"][open_BNTS] == 0).any()
    with pytest.raises(UsageError, match=r"mode = 'expect' is no mode.*'expected'"):
        model.forward(tokens, mode="expect")
    with pytest.raises(UsageError, match="'sample' needs a key"):
        model.forward(tokens, mode="sample")
