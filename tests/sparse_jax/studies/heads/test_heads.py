"""The study of heads: results are means of the measures, and what cannot be measured is named."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.inspect import head_measures
from lm_jax.run.results import load_result
from lm_jax.study import frame
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.studies.heads import STUDY, numbers, report, run
from sparse_jax.studies.heads.results import HeadsSummary
from sparse_jax.studies.heads.settings import HeadsConfig
from sparse_jax.studies.texts import first_texts
from tests.sparse_jax.graphs.small_graphs import small_model
from tests.sparse_jax.small_runs import save_base, write_text


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return HeadsConfig(
        model=str(save_base(folder / "model")),
        corpus=CorpusConfig(str(write_text(folder / "text")), "document", splits=(1.0, 0.0, 0.0)),
        texts=3,
        context=16,
        repeated=3,
        shown=1,
    )


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    frame.execute(STUDY, config, folder)
    return folder


def test_results_are_means_of_the_measures_of_texts_and_of_repeated_tokens(config, done):
    summary = load_result(done / "summary.json", HeadsSummary)
    model = lm_jax.load_pretrained(config.model)
    source, piece = run.SourceModel.load(config.model), model.tokenizer.piece
    texts = [("text", ids) for ids in first_texts(source, config.corpus, 3, context=16, least=4)]
    texts += [("repeated", ids) for ids in run._repeated(config, source)]
    said = pq.read_table(done / "texts.parquet").to_pylist()
    said = sorted((row["on"], row["tokens"]) for row in said)
    assert said == sorted((on, [piece(int(i)) for i in ids]) for on, ids in texts)
    sums, queries, induction, again, twice, halves = {}, 0, 0.0, 0, 0, set()
    rows = pq.read_table(done / "heads.parquet").to_pylist()
    by_text = {(r["on"], r["text"], r["layer"], r["head"]): r for r in rows}
    numbers_of = {"text": 0, "repeated": 0}
    for on, ids in texts:
        ids = [int(i) for i in ids]
        record = dict.fromkeys(head_measures.sites(model.cfg), lm_jax.keep)
        cache = model.run(ids, record=list(record)).cache
        found = head_measures.measure(
            *(model.params, model.cfg, {name: cache[name] for name in record}),
            *(jnp.asarray(ids), len(ids)),
        )
        number = numbers_of[on]
        numbers_of[on] += 1
        raised, lowered = head_measures.promoted(model.params, model.cfg, found.added_LND, 5)
        for layer, head in np.ndindex(found.query_LN.shape):
            row = by_text[on, number, layer, head]
            assert row["query"] == found.query_LN[layer, head]
            np.testing.assert_allclose(row["weights"], found.weight_LNS[layer, head], atol=1e-5)
            said_of = {
                name: [piece(int(i)) for i in x[layer, head]]
                for name, x in (("raised", raised), ("lowered", lowered))
            }
            assert {name: row[name] for name in said_of} == said_of
        if on == "text":
            queries += int(found.queries)
            again += int(found.repeated)
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + np.asarray(value)
        else:
            # Behind what the tokenizer puts before every text.
            assert ids[:1] == model.tokenizer.encode("a")[:1]
            half, ids = len(ids) // 2, ids[1:]
            halves.add(half)
            assert ids[:half] == ids[half:] and len(set(ids)) == half >= 3
            induction = induction + np.asarray(found.sums["induction"])
            twice += half
    assert (summary.tokens, summary.again, summary.twice) == (queries, again, twice)
    assert len(halves) > 1
    copying = head_measures.copying(model.params, model.cfg)
    for each in summary.heads:
        place = each.layer, each.head
        for field in ("first", "previous", "self", "entropy", "written"):
            wanted = sums[field][place] / queries
            got = getattr(each, "self_" if field == "self" else field)
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert each.copying == pytest.approx(copying[place], abs=1e-9)
        assert each.duplicate == pytest.approx(sums["duplicate"][place] / again, rel=1e-4)
        assert each.induction == pytest.approx(induction[place] / twice, rel=1e-4, abs=1e-6)


def test_the_page_shows_the_strongest_heads_or_those_that_are_named(config, done):
    summary = load_result(done / "summary.json", HeadsSummary)
    best = numbers.strongest(summary.heads, "induction", 1)[0]
    page = (done / "report.html").read_text("utf-8")
    assert f"Head {best.name}: induction {best.induction:.2f}" in page
    named = dataclasses.replace(config, heads=("1.0",))
    shown = report._chosen(named, summary)
    assert [(each.name, why) for each, why in shown] == [("1.0", "")]
    # Weights are random, so that no head is far above equal weights.
    equal = summary.equal[best.layer].induction
    said = (
        f"The strongest of {len(summary.heads)} heads: no induction head, at most {best.name} "
        f"({best.induction:.2f}, equal weights {equal:.2f}); no previous"
    )
    assert report.conclusion(summary).startswith(said)
    above = [
        dataclasses.replace(each, induction=equal + 0.5) if each is best else each
        for each in summary.heads
    ]
    said = report.conclusion(dataclasses.replace(summary, heads=tuple(above)))
    assert f"heads: {best.name} as an induction head (" in said
    assert "induction" in report.format_summary(dataclasses.replace(summary, heads=above[:2]))


def test_what_cannot_be_measured_is_named(config, tmp_path):
    for changes, said in (
        ({"heads": ("9.0",)}, r"config\.heads: 9\.0 is not there"),
        ({"heads": ("nine",)}, r"config\.heads: 'nine' is no head"),
        ({"context": 6}, r"config\.context = 6 must be 7"),
        ({"context": 10**5}, r"config\.context = 100000 is beyond"),
    ):
        with pytest.raises(UsageError, match=said):
            frame.execute(STUDY, dataclasses.replace(config, **changes), tmp_path / "run")
    with pytest.raises(BadInputError, match=r"are needed; lower config\.texts"):
        frame.execute(STUDY, dataclasses.replace(config, texts=10**6), tmp_path / "run")


def test_rows_of_the_embedding_beyond_the_tokens_are_never_read(config, tmp_path):
    """Embeddings are filled up to round sizes in some families."""
    model = lm_jax.load_pretrained(config.model)
    embed = model.params["embed"]["tokens"]
    more = np.full((50, embed.shape[1]), 30.0, np.float32)
    params = dict(model.params) | {
        "embed": {**model.params["embed"], "tokens": np.concatenate([embed, more])}
    }
    cfg = dataclasses.replace(model.cfg, vocab_size=model.cfg.vocab_size + 50, tie_embeddings=True)
    params.pop("unembed", None)
    lm_jax.save_pretrained(tmp_path / "model", cfg, params, model.tokenizer)
    own = dataclasses.replace(config, model=str(tmp_path / "model"), repeated=4)
    frame.execute(STUDY, own, tmp_path / "run")
    assert load_result(tmp_path / "run" / "summary.json", HeadsSummary).twice >= 12


def test_prototypes_are_no_heads(config):
    source = types.SimpleNamespace(model=small_model("protot"))
    with pytest.raises(BadInputError, match="has no attention heads; give a model of attention"):
        run._check(config, source)
