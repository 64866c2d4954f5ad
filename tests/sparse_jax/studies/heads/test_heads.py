"""The study of heads: results are means of the measures, and what cannot be measured is named."""

import dataclasses

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
from tests.sparse_jax.small_runs import save_base, write_text


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return HeadsConfig(
        model=str(save_base(folder / "model")),
        corpus=CorpusConfig(str(write_text(folder / "text")), "document", splits=(1.0, 0.0, 0.0)),
        texts=3,
        context=16,
        repeated=2,
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
    sums, queries, induction, again, twice = {}, 0, 0.0, 0, 0
    for on, ids in texts:
        ids = [int(i) for i in ids]
        record = dict.fromkeys(head_measures.sites(model.cfg), lm_jax.keep)
        cache = model.run(ids, record=list(record)).cache
        found = head_measures.measure(
            *(model.params, model.cfg, {name: cache[name] for name in record}),
            *(jnp.asarray(ids), len(ids)),
        )
        if on == "text":
            queries += int(found.queries)
            again += int(found.repeated)
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + np.asarray(value)
        else:
            half = len(ids) // 2
            assert ids[:half] == ids[half:] and len(set(ids)) == half
            induction = induction + np.asarray(found.sums["induction"])
            twice += half
    assert summary.tokens == queries
    for each in summary.heads:
        place = each.layer, each.head
        for field in ("first", "previous", "entropy", "written"):
            wanted = sums[field][place] / queries
            assert getattr(each, field) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
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
    said = f"Of {len(summary.heads)} heads the strongest are {best.name} as an induction head ("
    assert report.conclusion(summary).startswith(said)


def test_what_cannot_be_measured_is_named(config, tmp_path):
    for changes, said in (
        ({"heads": ("9.0",)}, r"config\.heads: 9\.0 is not there"),
        ({"heads": ("nine",)}, r"config\.heads: 'nine' is no head"),
        ({"context": 3}, r"config\.context = 3 must be 4"),
        ({"context": 10**5}, r"config\.context = 100000 is beyond"),
    ):
        with pytest.raises(UsageError, match=said):
            frame.execute(STUDY, dataclasses.replace(config, **changes), tmp_path / "run")
    with pytest.raises(BadInputError, match=r"are needed; lower config\.texts"):
        frame.execute(STUDY, dataclasses.replace(config, texts=10**6), tmp_path / "run")
