"""Dense and sparse models on the same questions: equal with open gates, and scored once."""

import json
import shutil

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.multiple_choice import TRUTHFULQA, Scorer, compare, truthfulqa
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.run.workdir import FINISHED_FILE
from lm_jax.study import frame
from lm_jax.text.tokenizer_training import train_tokenizer
from sparse_jax.gates import model as sparse_model
from sparse_jax.studies.multiple_choice import STUDY, report, run
from sparse_jax.studies.multiple_choice.settings import DENSE, MultipleChoiceConfig
from tests import tiny
from tests.lm_jax.text.synthetic_corpus import texts

COUNT = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model, the same with gates that are all open or all closed, and random questions."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer((text for _, text in texts(60)), vocab_size=110)
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=64, family="llama")
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(0), cfg))
    lm_jax.save_pretrained(folder / "dense", cfg, params, tokenizer)
    lm_jax.save_pretrained(folder / "control", cfg, params, tokenizer)
    base = lm_jax.load_pretrained(folder / "dense")
    for name, bias in (("open", 1e6), ("closed", -1e6)):
        gates = sparse_model.constant_gates(cfg, bias)
        sparse_model.save(folder / name, base, gates, {"open edges": name})
    words = sorted({word for _, text in texts(20) for word in text.split()})
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(COUNT):
        one, two, three = (" ".join(rng.choice(words, 3)) for _ in range(3))
        answers = {"choices": [two, three], "labels": [1, 0]}
        lines.append(json.dumps({"question": one, "mc1_targets": answers}))
    (folder / "mc.jsonl").write_text("\n".join(lines), "utf-8")
    return folder


def config_of(folders, *sparse, **changes):
    settings = {
        "dense": str(folders / "dense"),
        "sparse": tuple(str(folders / name) for name in sparse),
        "tasks": (),
        "truthfulqa": str(folders / "mc.jsonl"),
        "limit": 0,
        "batch_tokens": 256,
    }
    return STUDY.settings("", **settings | changes)


def test_equal_weights_of_another_configuration_have_their_own_scores(folders, tmp_path):
    """Both are in one comparison, and each has the scores that it has alone."""
    twin = shutil.copytree(folders / "dense", tmp_path / "twin")
    rope = {"rope_type": "default", "rope_theta": 3.0}
    tiny.edit_json(twin / "config.json", rope_parameters=rope)
    both = command(config_of(folders, controls=(str(twin),)), tmp_path / "both")
    alone = command(config_of(folders, dense=str(twin)), tmp_path / "alone")
    stores = {path.name for path in (tmp_path / "both" / "scores").iterdir()}
    (own,) = (path.name for path in (tmp_path / "alone" / "scores").iterdir())
    assert len(stores) == 2 and own in stores
    for metric in ("acc", "acc_norm"):
        of_both, of_alone = (
            each["tasks"][TRUTHFULQA]["metrics"][metric]["accuracy"] for each in (both, alone)
        )
        assert of_both[str(twin)] == of_alone[DENSE]
    paired = both["tasks"][TRUTHFULQA]["metrics"]["acc"]["paired"][str(twin)]
    assert paired["lost"] + paired["gained"] > 0


def test_a_comparison_is_of_the_gates_and_the_questions_but_not_of_noted_numbers(folders, tmp_path):
    models = shutil.copytree(folders, tmp_path / "models")
    config = from_plain(config_of(models, "closed"), MultipleChoiceConfig)
    note, before = models / "closed" / sparse_model.SPARSE, run.inputs(config)
    tiny.edit_json(note, numbers={"open edges": "other"})
    assert run.inputs(config) == before
    tiny.edit_json(note, gate_bias=[[1.0 for _ in row] for row in read_json(note)["gate_bias"]])
    with (models / "mc.jsonl").open("a") as file:
        file.write("\n")
    after = run.inputs(config)
    changed = {str(models / "closed"), "config.truthfulqa"}
    assert {name for name in before if before[name] != after[name]} == changed


def command(config, folder):
    frame.execute(STUDY, config, folder)
    return read_json(folder / frame.SUMMARY)


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """The folder of a comparison of all models, its settings and its summary."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = config_of(folders, "open", "closed", controls=(str(folders / "control"),))
    return folder, config, command(config, folder)


def test_open_gates_answer_as_the_dense_model_and_closed_ones_otherwise(folders, whole):
    folder, config, summary = whole
    closed = str(folders / "closed")
    task = summary["tasks"][TRUTHFULQA]
    assert task["n"] == COUNT and task["chance"] == 0.5
    accuracy = task["metrics"]["acc"]["accuracy"]
    same = task["metrics"]["acc"]["paired"][str(folders / "open")]
    assert accuracy[str(folders / "open")] == accuracy[DENSE]
    assert (same["lost"], same["gained"], same["p_value"]) == (0, 0, 1.0)

    # The oracle for closed gates is a model whose attention weights are 0.
    dense = lm_jax.load_pretrained(folders / "dense")
    questions = truthfulqa(folders / "mc.jsonl")

    def without_attention(tokens_BT, valid_BT):
        def attend(scores_BNTS):
            return 0.0 * jax.nn.softmax(scores_BNTS)

        return lm_jax.forward(dense.params, tokens_BT, dense.cfg, attend=attend).logits

    scorer = Scorer(jax.jit(without_attention), dense.tokenizer, 64, 256)
    want = compare({"closed": scorer}, {"task": questions})["tasks"]["task"]
    result = accuracy[closed]["estimate"]
    assert result == want["metrics"]["acc"]["accuracy"]["closed"]["estimate"]
    paired = task["metrics"]["acc"]["paired"][closed]
    assert paired["lost"] + paired["gained"] > 0
    read = frame.load_summary(STUDY, folder)
    lines = report.build(from_plain(config, MultipleChoiceConfig), read, folder).lines
    assert any("closed" in line and f"{100 * result:.1f}" in line for line in lines)
    # Answers come first, on the page and in the terminal.
    first = lines[0]
    assert first.startswith(f"Right on {TRUTHFULQA} (acc, n = ")
    assert first.count("; ") == len(read.models) - 1
    assert "points, p = " in first


def test_models_are_shown_by_the_end_of_their_paths_where_these_differ():
    names = ["dense", "/runs/a/seed_0/control/model", "/runs/a/seed_0/target_3.1/model"]
    assert list(report._short_names(names).values()) == [
        "dense",
        "seed_0/control/model",
        "seed_0/target_3.1/model",
    ]
    same = [*names, "/runs/b/seed_0/control/model"]
    assert report._short_names(same) == {name: name for name in same}


def test_a_control_answers_as_a_dense_model(folders, whole):
    summary = whole[2]
    control, opened, closed = (str(folders / name) for name in ("control", "open", "closed"))
    metric = summary["tasks"][TRUTHFULQA]["metrics"]["acc"]
    assert list(metric["accuracy"]) == [DENSE, control, opened, closed]
    # The control is the dense model, and so the change from either is the same.
    changes = {name: metric["paired"][name] for name in (opened, closed)}
    assert metric["over_controls"] == {control: changes}
    assert metric["accuracy"][control] == metric["accuracy"][DENSE]
    assert metric["paired"][control]["lost"] == metric["paired"][control]["gained"] == 0
    assert summary["edges"] == {opened: "open", closed: "closed"}


@pytest.mark.parametrize("role", ["dense", "controls"])
def test_a_sparse_model_is_no_dense_one(folders, tmp_path, role):
    """Its gates would be left out."""
    closed = str(folders / "closed")
    changes = {role: closed if role == "dense" else (closed,)}
    with pytest.raises(BadInputError, match=r"closed is a sparse model.*--config\.sparse"):
        command(config_of(folders, "open", **changes), tmp_path / "run")


def test_a_scored_choice_is_not_scored_again(whole, tmp_path, monkeypatch):
    folder, config, first = whole
    again, calls = shutil.copytree(folder, tmp_path / "run"), []
    (again / FINISHED_FILE).unlink()
    monkeypatch.setattr(run, "_logits", lambda *given: calls.append(given))
    assert command(config, again) == first and calls == []


def test_invalid_settings_are_refused(folders, tmp_path):
    with pytest.raises(UsageError, match=r"limit = -1.*'arc_esy'; did you mean 'arc_easy'"):
        MultipleChoiceConfig(tasks=("arc_esy",), limit=-1)
    with pytest.raises(UsageError, match="names no task"):
        MultipleChoiceConfig(tasks=())
    for twice in ({"sparse": ("a", "b", "a")}, {"controls": ("a",), "sparse": ("a",)}):
        with pytest.raises(UsageError, match="name a model twice"):
            MultipleChoiceConfig(**twice)
    with pytest.raises(UsageError, match=r"write \./dense"):
        MultipleChoiceConfig(sparse=("dense",))
    with pytest.raises(BadInputError, match=r"no sparse\.json"):
        command(config_of(folders, "dense"), tmp_path / "run")
    smoke = from_plain(STUDY.settings("smoke"), MultipleChoiceConfig)
    assert smoke.limit == 2 and isinstance(STUDY.settings(""), ConfigDict)
