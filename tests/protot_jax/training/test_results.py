"""The JSON files of pretraining, studies and searches are read as they were written."""

import dataclasses
import json
import math

import pytest

from lm_jax.errors import CorruptError
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result
from lm_jax.text.preparation import SplitSize
from protot_jax.training import results
from protot_jax.training.seeds import over_seeds


def pretrain_summary(*seeds):
    """Of seeds whose best and last weights have `(step, validation, test perplexity)`."""
    return results.PretrainSummary(
        model="protot",
        parameters=10,
        parameters_in_use=9,
        forward_flops_per_example=2_000_000,
        tie_embeddings=True,
        compute_dtype="float32",
        weights_and_moments_dtype="float32",
        corpus=results.CorpusSummary(
            source="texts",
            splits={"train": SplitSize(share=0.8, documents=50, tokens=6_000)},
            documents_used={"train": 40},
            training_examples=40,
            skipped={"empty": 1},
            truncated_documents=2,
            unused_tokens=30,
        ),
        unigram_perplexity=36.0,
        seeds=tuple(
            results.SeedSummary(
                seed=seed,
                steps=last[0],
                tokens_seen=5_000,
                validation_tokens=1_000,
                test_tokens=900,
                best=results.CheckpointPerplexity(*best),
                last=results.CheckpointPerplexity(*last),
            )
            for seed, (best, last) in enumerate(seeds)
        ),
        device="cpu",
    )


DONE = results.Trial(
    trial=1,
    status="done",
    drawn={"learning_rate": 1e-3, "batch_size": 32, "tie_embeddings": True, "model": "llama"},
    flops=10,
    config_hash="c",
    perplexity=3.0,
    seed_perplexities=(2.0, 4.0),
)
REFUSED = results.Trial(0, "refused", {"learning_rate": 1.0}, 99, "d", reason="too many FLOPs")
SUMMARIES = {
    "pretraining": pretrain_summary(((2, 11.0, math.inf), (4, math.nan, 15.0))),
    "study": results.StudySummary(
        table="Table 0",
        paper_split="test",
        rows=(
            results.StudyRow(
                variant="two",
                changes=("dropout=0.1",),
                learning_rate=1e-3,
                rates_tried=2,
                perplexity=results.PerplexityBySplit(
                    over_seeds([1.0, 2.0, 4.0]), over_seeds([math.inf])
                ),
                tokens_seen=10,
                steps_per_second=2.5,
                paper=None,
            ),
        ),
    ),
    "search": results.SearchSummary("tpe", (1, 2), DONE, "--config.batch_size=32", (REFUSED, DONE)),
    "search without a best trial": results.SearchSummary("tpe", (1,), None, None, (REFUSED,)),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_read_as_it_was_written(name, tmp_path):
    summary = SUMMARIES[name]
    write_json(tmp_path / "result.json", summary)
    loaded = load_result(tmp_path / "result.json", type(summary))
    # By their text, for NaN is not equal to itself.
    assert repr(loaded) == repr(summary)
    assert list(json.loads((tmp_path / "result.json").read_text())) == [
        field.name for field in dataclasses.fields(summary)
    ]


def test_a_trial_without_the_fields_that_do_not_apply_is_read(tmp_path):
    """Searches once left such fields out; now they are null."""
    content = {"trial": 3, "status": "running", "drawn": {}, "flops": 1, "config_hash": "c"}
    (tmp_path / "trial.json").write_text(json.dumps(content))
    assert load_result(tmp_path / "trial.json", results.Trial) == results.Trial(**content)


@pytest.mark.parametrize(
    ("name", "break_it", "message"),
    [
        ("pretraining", lambda d: d.update(parameters="10"), "parameters = '10' (str); give a int"),
        ("pretraining", lambda d: d["seeds"][0].pop("best"), "seeds[0].best is missing"),
        (
            "pretraining",
            lambda d: d["corpus"]["splits"]["train"].update(share=1.5),
            "corpus.splits.train.share = 1.5 (float); give a float from 0 to 1",
        ),
        ("study", lambda d: d.update(paper_split="train"), "paper_split = 'train' is not one of"),
        (
            "study",
            lambda d: d["rows"][0]["perplexity"].pop("test"),
            "rows[0].perplexity.test is missing",
        ),
        ("search", lambda d: d["trials"][1].update(flop=1), "trials[1].flop is not a field of Tri"),
        ("search", lambda d: d["best"].update(reason="x"), "trial 1 is done with reason"),
    ],
)
def test_a_damaged_summary_is_refused_with_its_path_the_fault_and_the_remedy(
    name, break_it, message, tmp_path
):
    file = tmp_path / "result.json"
    write_json(file, SUMMARIES[name])
    content = json.loads(file.read_text())
    break_it(content)
    file.write_text(json.dumps(content))
    with pytest.raises(CorruptError) as error:
        load_result(file, type(SUMMARIES[name]))
    assert str(file) in str(error.value) and message in str(error.value)
    assert str(error.value).endswith("restore it, or start again in another --workdir")
