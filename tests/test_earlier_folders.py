"""Work folders of the version before studies had one frame: read, and resumed or refused.

`tests/golden/studies/COMMAND` has the settings, the summary and the tables that a page needs of a
small run, made by `iaj COMMAND` at commit 8513c5c4, or later but before the command had the frame,
with paths relative to the folder it ran in.
"""

import importlib
from pathlib import Path
import shutil
import tomllib

import pytest

from iaj import commands as front
from lm_jax.errors import UsageError
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import read_json
from lm_jax.run.workdir import open_workdir
from lm_jax.study import frame
from lm_jax.weights.load import load_pretrained
from lm_jax.weights.peft_settings import is_peft
import protot_jax
from protot_jax.studies.pretraining import STUDY as PRETRAINING
from sparse_jax.gates.model import SPARSE, read_note

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "studies"
STUDIES = {
    " ".join(words): importlib.import_module(module).STUDY
    for words, module in front.COMMANDS.items()
    if front.is_study(module)
}
# Commands that were made with the frame.
YOUNGER = {"polyattn bench", "polyattn rankings", "sparse heads", "sparse lens"}
# Commands that had flags alone, whose settings have other names now, with one of those of before.
RENAMED = {
    "polyattn check": "attention",
    "protot concepts": "answers",
    "protot graph": "step",
    "protot intervene": "concepts",
    "protot judge": "models",
    "protot perturb": "files_sha256",
    "protot robustness": "models",
    "protot scores": "sha256",
}
# The models of a paper's audits were no setting.
ADDED = {"polyattn paper": "models"}
# Their pages need files that are too large to be kept here.
WITHOUT_PAGE = {
    *("polyattn paper", "sparse addition", "sparse circuits", "sparse pair", "sparse posttrain"),
    "sparse transcoder",
}


def folder(command):
    return GOLDEN / command.replace(" ", "_")


@pytest.fixture(params=sorted(STUDIES.keys() - YOUNGER))
def command(request):
    return request.param


def test_its_summary_is_read(command):
    assert frame.load_summary(STUDIES[command], folder(command))


def test_it_is_resumed_by_the_same_settings_or_refused_by_name(command, tmp_path):
    study, copied = STUDIES[command], tmp_path / "run"
    shutil.copytree(folder(command), copied)
    (copied / "log.txt").touch()
    stored = read_json(copied / "config.json")
    named = RENAMED.get(command) or ADDED.get(command)
    if command in RENAMED:
        with pytest.raises(UsageError, match=rf"config\.{named} is not a field of"):
            from_plain(stored, study.config)
        wanted = to_plain(study.settings("smoke"))
    else:
        wanted = to_plain(from_plain(stored, study.config))
    if named is None:
        with open_workdir(copied, wanted, may_change=study.may_change) as work:
            assert work.resumed
        return
    with (
        pytest.raises(UsageError, match="as a run of an earlier version") as error,
        open_workdir(copied, wanted, may_change=study.may_change),
    ):
        pass
    assert "holds a run with config." in str(error.value) and "--resume=force" in str(error.value)


def test_its_page_is_made(command):
    if command in RENAMED or command in WITHOUT_PAGE:
        return
    study, place = STUDIES[command], folder(command)
    config = from_plain(read_json(place / "config.json"), study.config)
    built = study.function("report")(config, frame.load_summary(study, place), place)
    assert built.title and built.lines and built.sections()


def test_trained_models_of_the_repository_are_read():
    trained = {place.name for place in (ROOT / "models").iterdir() if place.is_dir()}
    assert trained
    for name in trained:
        place = ROOT / "models" / name
        if name.startswith("pair"):
            assert frame.load_summary(STUDIES["sparse pair"], place).variants
            assert load_pretrained(place / "dense" / "model").sha256
        elif (place / SPARSE).is_file():
            # Its base is not in the repository.
            assert read_note(place)["numbers"] and is_peft(place)
        else:
            config = from_plain(read_json(place / "config.json"), PRETRAINING.config)
            assert frame.load_summary(PRETRAINING, place).seeds
            assert protot_jax.load_run(place).config.model == config.model


def test_results_of_the_repository_are_read():
    read = set()
    for file in sorted((ROOT / "results").glob("*/*/result.toml")):
        made = tomllib.loads(file.read_text("utf-8")).get("reproduce", {})
        words = made.get("command", "").split()
        study = STUDIES.get(" ".join(words[1:3])) if words[:1] == ["iaj"] else None
        # Of some only the parts are kept that pages need, and a pair's is with its models.
        stored = frame.summary_file(file.parent).is_file() and not made.get("parts")
        if study is not None and stored:
            assert frame.load_summary(study, file.parent)
            read.add(study.command)
    assert {"sparse circuits", "protot intervene", "polyattn paper", "protot robustness"} <= read
