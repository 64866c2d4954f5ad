"""Heads by value norm and features of an autoencoder, in the report of a run with prototypes."""

import json

import jsonschema
import numpy as np
import pytest

from lm_jax.run.files import read_json
from lm_jax.run.results import json_schema, load_result
from lm_jax.study import command, frame
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import open_prepared
import protot_jax
from protot_jax.studies.concepts import STUDY, collect, measures, ranking, scores
from protot_jax.studies.concepts.results import ConceptReport
from tests.protot_jax.small_runs import save_untrained, settings

FLAGS = ("--length=16", "--top=3", "--resamples=99")


def launched(*flags):
    return command.run(STUDY, ["iaj protot concepts", *flags])


@pytest.fixture(scope="module")
def compared(run, attention_run, tmp_path_factory):
    """A report with the heads and the features of LLaMA, and the texts of both."""
    folder = tmp_path_factory.mktemp("units")
    flags = [f"--compare={kind}:{attention_run}" for kind in ("heads", "sae")]
    answers = folder / "answers.jsonl"
    answers.touch()
    flags += [f"--run={run}", f"--workdir={folder / 'out'}", f"--judge=cached:{answers}"]
    assert launched(*flags, *FLAGS) == 0
    model = protot_jax.load_run(attention_run)
    data = Examples(open_prepared(run / "data"), "validation", context=15)
    parts = collect.long_enough(data, collect.marks(model.tokenizer), 4_000, 64)
    return folder, model, next(parts)


def norms(model, token_NT):
    """Value norms of the first layer in float64, which only the token itself decides."""
    x_NTD = np.float64(model.params["embed"]["tokens"])[token_NT]
    block = {name: np.float64(leaf[0]) for name, leaf in model.params["blocks"]["mixer"].items()}
    scale_D = np.float64(model.params["blocks"]["ln1"]["scale"][0])
    x_NTD = x_NTD / np.sqrt((x_NTD**2).mean(-1, keepdims=True) + model.cfg.norm_eps) * scale_D
    return np.linalg.norm(np.einsum("NTD,DKH->NTKH", x_NTD, block["v"]), axis=-1)


def test_heads_are_described_by_the_norms_of_their_values(compared):
    folder, model, texts = compared
    content = read_json(folder / "out" / frame.SUMMARY)
    jsonschema.validate(content, json_schema(ConceptReport))
    result = load_result(folder / "out" / frame.SUMMARY, ConceptReport)
    assert result.settings.texts == len(texts.token_NT)
    heads, _ = result.comparisons
    assert (heads.kind, heads.run, heads.model) == ("heads", "llama, seed 1", "llama")
    assert [one.units for one in heads.layers] == [4, 4] and len(heads.units) == 8
    norm_NTU = norms(model, texts.token_NT)
    norm_MU = norm_NTU[texts.token_mask_NT]
    first = heads.layers[0]
    # Norms are computed in float32: a few hundred roundings in sums of a hundred terms.
    close = {"rel": 1e-4}
    for name in ("l1_ratio", "gini", "entropy"):
        own = getattr(first, name)
        assert own.estimate == pytest.approx(getattr(measures, name)(norm_MU).mean(), **close)
        assert own.low <= own.estimate <= own.high and own.n == len(norm_MU)
    mean_NU, _ = ranking.text_scores(norm_NTU, texts.token_mask_NT)
    for unit in heads.units[:4]:
        of_unit_M = norm_MU[:, unit.unit]
        assert unit.max == pytest.approx(of_unit_M.max(), **close) and unit.active == 1
        means = [top.mean for top in unit.top_texts]
        assert means == pytest.approx(
            sorted(mean_NU[:, unit.unit])[: -len(means) - 1 : -1], **close
        )
        for top in unit.top_texts:
            assert len(top.activation) == len(result.texts[top.text].tokens)
            assert top.mean == pytest.approx(np.mean(top.activation), **close)


def test_features_are_as_many_as_prototypes_and_explain_something(compared):
    folder, _, texts = compared
    result = load_result(folder / "out" / frame.SUMMARY, ConceptReport)
    heads, features = result.comparisons
    (layer,) = features.layers
    assert layer.layer == 0 and layer.units == len(features.units) == len(result.prototypes)
    fit = features.autoencoder
    assert heads.autoencoder is None and 0 < fit.unexplained < 1
    # The training split of the run, cut as the analysed texts are.
    assert fit.tokens > texts.token_mask_NT.sum()
    assert features.perplexity == heads.perplexity


def test_a_judge_is_asked_about_all_units_and_the_page_shows_them(compared):
    folder, _, _ = compared
    result = load_result(folder / "out" / frame.SUMMARY, ConceptReport)
    asked = (folder / "answers.jsonl.missing").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in asked]
    # Equal prompts are listed once each time that they are asked.
    assert len(prompts) == 3 * 8 + 10
    groups = [one.group for one in scores.by_layer(result)]
    assert groups[-3:] == ["heads of llama, seed 1", "features of llama, seed 1", "random texts"]
    page = (folder / "out" / frame.REPORT).read_text("utf-8")
    for text in ("Units of other models", "Layer 1, head 3.", "Layer 0, feature 7.", "unexplained"):
        assert text in page


def test_units_that_cannot_be_compared_are_refused(run, attention_run, text, tmp_path, capsys):
    config = settings(text, model="llama", seeds=(1,))
    config.corpus.vocab_size = 50
    other = save_untrained(config, tmp_path / "other")
    for named, code, message in (
        ("norms:x", 2, "is not of the form heads:RUN or sae:RUN"),
        (f"heads:{run}", 2, "trained 'protot', which has no attention heads"),
        (f"heads:{attention_run}/seed_3", 2, "seed = 3"),
        (f"sae:{other}", 3, "has another tokenizer"),
    ):
        out = tmp_path / "out"
        assert launched(f"--run={run}", f"--compare={named}", f"--workdir={out}") == code
        assert message in capsys.readouterr().err and not out.exists()
