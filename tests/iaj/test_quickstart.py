"""The steps of the quickstart exist, end as they should, and are on its index page."""

import dataclasses
import json
from pathlib import Path
import subprocess
import sys

import pytest

from iaj import commands, index_page, pictures, quickstart
from lm_jax.assets import entries, published
from lm_jax.console.config_files import load_config
from tests.browser import PageReader

ROOT = Path(__file__).parents[2]
LISTS = {"published": quickstart.STEPS, "trained": quickstart.TRAINING_STEPS}


@pytest.mark.parametrize("steps", LISTS.values(), ids=LISTS)
def test_every_step_is_a_command(steps):
    folders = []
    for step in steps:
        words = step.words()
        assert words[:2] in commands.COMMANDS
        flags = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
        if config := flags.get("config"):
            assert load_config(config)
        folders += [flags[name] for name in ("workdir", "run") if name in flags]
        # A report is in a folder that a command up to this one writes.
        assert not step.report or any(step.report.startswith(folder) for folder in folders)
        assert set(step.assets) <= entries().keys()


def test_models_are_those_of_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for step in quickstart.STEPS for word in step.words()]
    assert "--run=models/protot_whole" in words
    assert "--judge=cached:docs/data/concept_answers_whole.jsonl" in words
    models = [
        word.partition("=")[2] for word in words if word.partition("=")[2].startswith("models/")
    ]
    assert len(models) == 5 and all((ROOT / model).is_dir() for model in models)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Commands in an empty folder, each of which writes its report; `[2]` makes the second fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart.assets, "fetch", lambda name: None)
    monkeypatch.setattr(
        quickstart,
        "STEPS",
        [
            dataclasses.replace(one, picture=None, answer=lambda page: "so")
            for one in LISTS["published"]
        ],
    )
    found = []

    def call(command):
        found.append(tuple(command[3:]))
        report = Path(quickstart.STEPS[len(found) - 1].report)
        if fails := len(found) == fail_at[0]:
            return 3 * fails
        report.parent.mkdir(parents=True)
        report.write_text("a report")
        return 0

    fail_at = [0]
    monkeypatch.setattr(quickstart.subprocess, "call", call)
    return found, fail_at


def test_the_last_line_is_the_index_of_all_reports(started, capsys):
    assert quickstart.main([]) == 0
    index = Path(quickstart.INDEX)
    assert capsys.readouterr().out.splitlines()[-1] == index.absolute().as_uri()
    read = PageReader(index.read_text("utf-8"))
    links = {link for link in read.values("href") if link and not link.startswith("#")}
    assert len(links) == 4 and all((index.parent / link).is_file() for link in links)
    assert "Still to come" not in read.text and not read.scripts


def test_a_step_that_fails_ends_the_run_with_its_exit_code(started, capsys):
    found, fail_at = started
    fail_at[0] = 2
    assert quickstart.main([]) == 3
    assert found == [step.words() for step in quickstart.STEPS[:2]]
    assert "open in a browser" not in capsys.readouterr().out
    # The first report is on the index all the same.
    text = PageReader(Path(quickstart.INDEX).read_text("utf-8")).text
    assert quickstart.STEPS[0].title in text
    assert all(step.title in text.partition("Still to come")[2] for step in quickstart.STEPS[1:])
    assert quickstart.main(["--fast"]) == 2
    assert len(found) == 2


def test_a_model_that_is_missing_ends_the_run_in_one_line(started, monkeypatch, capsys):
    monkeypatch.setattr(published, "find", lambda name: None)
    assert quickstart.main([]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "iaj fetch pair_192 --from CHECKOUT" in error


# Signals itself too as soon as the step has started, before it waits for it.
RUN_ONE_STEP = """
import os
import signal
import subprocess
import sys
from iaj import quickstart

class Started(subprocess.Popen):
    def __init__(self, command):
        super().__init__(command)
        os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Started
quickstart.assets.fetch = lambda name: None
quickstart.STEPS = (quickstart.Step(("step",)),)
sys.executable = sys.argv[1]
sys.exit(quickstart.main([]))
"""
SAVES = "trap 'sleep 1; echo saved; exit 75' INT; kill -INT 0; sleep 5"
IS_KILLED = "kill -INT 0; sleep 5"


@pytest.mark.parametrize(
    ("step", "code", "said"),
    [(SAVES, 75, "saved"), (IS_KILLED, 130, "")],
    ids=["saves", "is killed"],
)
def test_ctrl_c_stops_the_step_which_saves_first(step, code, said, tmp_path):
    """The step signals its whole group, as a terminal does."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\n{step}\n")
    program.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-c", RUN_ONE_STEP, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert result.returncode == code
    assert result.stdout.splitlines() == ["step 1 of 1: iaj step", *said.split()]
    assert not result.stderr


def test_ctrl_c_while_assets_are_fetched_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.assets, "fetch", interrupted)
    assert quickstart.main([]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_the_answer_is_the_last_verdict_on_top_of_a_page(tmp_path):
    page = tmp_path / "report.html"
    page.write_text(
        '<header><div class="verdict good" role="note">\n<strong>It works.</strong></div>'
        '<div class="verdict bad"><strong>2 &lt; 3 of <b>all</b>.</strong></div></header>'
        '<main><div class="verdict"><strong>Not this.</strong></div></main>'
    )
    assert index_page.verdict(page) == "2 < 3 of all."


def write(folder, name, content):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def test_prototypes_are_said_and_drawn_from_their_numbers(tmp_path):
    label = {"theme": "full stops", "disentanglement": 7, "coverage": 9}
    rows = [
        {"layer": 0, "prototype": 0, "half_life": 0.5, "label": None},
        {"layer": 0, "prototype": 1, "half_life": 8.0, "label": label},
        {"layer": 1, "prototype": 0, "half_life": None, "label": None},
        {"layer": 1, "prototype": 1, "half_life": 2.0, "label": label | {"disentanglement": 3}},
    ]
    folder = write(tmp_path, "summary.json", {"prototypes": rows})
    said = index_page.prototypes(folder / "report.html")
    assert "of 0.5 to inf tokens" not in said
    assert "a language model named 2 of them, and prototype 1 of layer 0 “full stops”" in said
    drawn = pictures.prototypes(folder)
    assert drawn is not None and drawn.count("<rect") == 4


def test_a_graph_is_said_and_drawn_from_its_numbers(tmp_path):
    graph = {
        "prompt": "a b",
        "logits": [{"token": " c", "probability": 0.751}],
        "sizes": {"features": 9, "kept_features": 2, "kept_edges": 2},
        "scores": {"unpruned": {"replacement": 0.5}},
    }
    write(tmp_path, "summary.json", {"graphs": [graph]})
    nodes = [
        {"node_id": name, "layer": layer, "ctx_idx": at}
        for name, layer, at in (("t", "E", 0), ("f", "0", 1), ("l", "1", 1))
    ]
    links = [
        {"source": "t", "target": "f", "weight": 2.0},
        {"source": "f", "target": "l", "weight": -1.0},
    ]
    write(tmp_path, "graph/a-b.json", {"nodes": nodes, "links": links})
    write(tmp_path, "graph/graph-metadata.json", {"graphs": []})
    answer = "After “a b”, “c” has a probability of 75.1 %; the strongest path to it is b → c."
    page = tmp_path / "report.html"
    page.write_text(f'<div class="verdict none"><strong>{answer}</strong></div><main>', "utf-8")
    said = index_page.graph(page)
    assert said.startswith(f"{answer} 2 of its 9 active features are kept, with 2 edges")
    drawn = pictures.graph(tmp_path)
    assert drawn is not None and drawn.count("<line") == 2 and drawn.count("<circle") == 3


def test_circuits_and_recipes_are_drawn_from_their_numbers(tmp_path):
    points = [{"size": 1, "explained": 0.4}, {"size": 100, "explained": 1.2}]
    curve = {
        "component": "token_edges",
        "ranking": "absolute",
        "scope": "prompt",
        "points": points,
    }
    results = [{"task": "ioi", "model": name, "curves": [curve]} for name in ("dense", "sparse")]
    drawn = pictures.circuits(write(tmp_path / "circuits", "summary.json", {"results": results}))
    assert drawn is not None and drawn.count("<polyline") == 2 and ">sparse<" in drawn
    results = [{"task": "ioi", "model": "dense", "curves": []}]
    assert (
        pictures.circuits(write(tmp_path / "heads", "summary.json", {"results": results})) is None
    )
    rows = [{"recipe": "softmax", "accuracy": {"estimate": 0.95}}]
    drawn = pictures.recipes(write(tmp_path / "audit", "summary.json", {"sweep": rows}))
    assert drawn is not None and ">softmax<" in drawn and ">95%<" in drawn
