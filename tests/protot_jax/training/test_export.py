"""An exported model is that of its run in every bit, read in its place, and whole or refused."""

import json
import shutil

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from iaj.run_readers import register_all
from lm_jax.console import cli
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model.decoder import param_spec
from lm_jax.parallel import sharding
from lm_jax.run.files import content_digest, read_json, write_json, write_manifest
from lm_jax.study import command as study_command
from lm_jax.study import frame
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import MANIFEST, open_prepared
from lm_jax.train.objective import cast_params
from lm_jax.weights import runs
import protot_jax
from protot_jax.analysis import generate
from protot_jax.studies import concepts
from protot_jax.studies.concepts import units
from protot_jax.studies.judging import run as judging
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import export, exported, pretrain, run_options, saved_run
from protot_jax.training.seeds import over_seeds


def command(*flags):
    return cli.run(export.main, ["export", *map(str, flags)], options=export.Options)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """Seed 2, whose best weights are those after 2 of 4 steps, with at most 10 documents."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    flags = (f"--run={run}", "--run_seed=2", "--documents=10", f"--workdir={folder}")
    assert command(*flags) == 0
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def sealed(folder):
    """Writes the manifest anew, as of files that belong together."""
    manifest = json.loads((folder / "export.json").read_text("utf-8"))
    (folder / "export.json").unlink()
    left = {k: v for k, v in manifest.items() if k not in ("format", "files", "sha256")}
    write_manifest(folder, exported.FORMAT, left)


def test_it_is_the_model_of_the_run(run, folder):
    own, wanted = protot_jax.load_run(folder), protot_jax.load_run(run, seed=2)
    assert (own.cfg, own.mixer, own.seed, own.step) == (wanted.cfg, wanted.mixer, 2, 2)
    assert own.tokenizer.sha256 == wanted.tokenizer.sha256
    jax.tree.map(np.testing.assert_array_equal, own.params, wanted.params)
    # By an independent reader, under the names of the parameters.
    stored = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(
        stored["blocks/mixer/prototypes"], wanted.params["blocks"]["mixer"]["prototypes"]
    )
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=1)
    split = protot_jax.load_run(folder, mesh=mesh)
    by_run = protot_jax.load_run(run, seed=2, mesh=mesh)
    assert jax.tree.map(lambda x: x.sharding, split.params) == jax.tree.map(
        lambda x: x.sharding, by_run.params
    )
    jax.tree.map(np.testing.assert_array_equal, split.params, wanted.params)


def test_matrices_are_rounded_on_request_and_read_as_float32(run, tmp_path, capsys):
    """As passes in bfloat16 read them; gates, norms and rates keep every bit."""
    place = tmp_path / "rounded"
    flags = (f"--run={run}", "--run_seed=2", "--documents=1", "--dtype=bfloat16")
    assert command(*flags, f"--workdir={place}") == 0
    assert "of test text, bfloat16, " in capsys.readouterr().out
    model, whole = protot_jax.load_run(place), protot_jax.load_run(run, seed=2)
    spec = param_spec(whole.cfg, whole.mixer)
    rounded = cast_params(whole.params, spec, jnp.bfloat16, pretrain.casts)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    jax.tree.map(np.testing.assert_array_equal, model.params, widened)
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}
    # Both kinds are in the file.
    stored = load_file(place / "model.safetensors")
    assert stored["blocks/mixer/prototypes"].dtype == jnp.bfloat16
    assert stored["blocks/mixer/alpha"].dtype == np.float32
    assert json.loads((place / "export.json").read_text("utf-8"))["dtype"] == "bfloat16"


def test_its_summary_and_card_are_those_of_its_seed(run, folder):
    whole = json.loads((run / "summary.json").read_text("utf-8"))
    own = json.loads((folder / "summary.json").read_text("utf-8"))
    assert own == whole | {"seeds": [whole["seeds"][1]]}
    reported = whole["seeds"][1]["best"]
    card = (folder / "README.md").read_text("utf-8")
    for split in ("validation", "test"):
        shown = over_seeds([reported[f"{split}_perplexity"]])
        assert f"| {split} perplexity, best weights | {shown} |" in card
    assert "the weights of lowest validation perplexity, after 2 updates" in card
    manifest = json.loads((folder / "export.json").read_text("utf-8"))
    assert manifest["provenance"]["data"]["checkpoint"] == protot_jax.load_run(run, seed=2).sha256
    trained = json.loads((run / "provenance.json").read_text("utf-8"))
    assert manifest["trained"] == {
        name: trained[name] for name in ("start", "git", "packages", "device")
    }
    assert set(manifest["files"]) == {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "export.json"
    }


def test_it_has_the_first_held_out_documents_and_no_training_text(run, folder):
    data = open_prepared(run / "data")
    own = open_prepared(folder / "data", tokenizer=data.tokenizer)
    for split in ("validation", "test"):
        wanted = Examples(data, split, context=8, mode="window", limit=10)
        got = Examples(own, split, context=8, mode="window")
        assert got.documents == wanted.documents <= 10 and got.count == wanted.count
        places = np.arange(wanted.count)
        np.testing.assert_array_equal(got.read(places)["tokens"], wanted.read(places)["tokens"])
    with pytest.raises(BadInputError, match="holds 0 tokens in 0 documents"):
        Examples(own, "train", context=8)


def test_commands_read_it_in_place_of_its_run(run, folder, tmp_path, capsys):
    """The same text, the same report but for names, and the same gates."""
    said, reports = [], []
    for place, seed in ((run, "--run_seed=2"), (folder, "--run_seed=2")):
        argv = ["generate", f"--run={place}", seed, "--prompt=the people", "--tokens=8"]
        assert cli.run(generate.main, argv, options=generate.Options, workdir_required=False) == 0
        said.append(capsys.readouterr().out)
        work = tmp_path / f"concepts_{len(said)}"
        flags = (f"--run={place}", seed, "--texts=8", "--ablated=0", f"--workdir={work}")
        assert study_command.run(concepts.STUDY, ["iaj protot concepts", *flags]) == 0
        capsys.readouterr()
        reports.append(json.loads((work / frame.SUMMARY).read_text("utf-8")))
    assert said[0] == said[1]
    assert reports[0]["prototypes"] == reports[1]["prototypes"]
    assert reports[0]["layers"] == reports[1]["layers"]


def test_a_run_and_its_export_are_one_model(run, folder):
    """So that no report compares a model with itself; other seeds and weights are others."""
    with pytest.raises(UsageError, match=f"--run={folder} is the same model as {run}"):
        run_options.load_each([f"{run}/seed_2", str(folder)])
    others = run_options.load_each([str(folder), f"{run}/seed_1"])
    assert [model.seed for _, model in others] == [2, 1]
    (last,) = run_options.load_each([f"{run}/seed_2"], best=False)
    assert last[1].checkpoint_sha256 != others[0][1].checkpoint_sha256
    # Each has the digest of its own files.
    assert others[0][1].sha256 != protot_jax.load_run(run, seed=2).sha256


@pytest.mark.parametrize("name", ["model", "seed_7"])
def test_the_other_libraries_read_it(run, folder, name, tmp_path, monkeypatch):
    """Also under the name of a seed."""
    place = shutil.copytree(folder, tmp_path / name)
    assert saved_run.split_seed(place) == (place, None)
    assert saved_run.split_seed(run / "seed_2") == (run, 2)
    monkeypatch.setattr(runs, "_READERS", {})
    register_all()
    read = runs.read_run(place)
    assert read is not None and read.sha256 == protot_jax.load_run(folder).sha256
    wanted = protot_jax.load_run(run, seed=2).params
    jax.tree.map(np.testing.assert_array_equal, read.params, wanted)


def test_only_what_was_exported_is_read(folder):
    with pytest.raises(UsageError, match="has the best weights alone, of step 2; read it with"):
        protot_jax.load_run(folder, best=False)
    with pytest.raises(UsageError, match="seed = 1 is none of 2"):
        protot_jax.load_run(folder, seed=1)


def test_the_last_weights_can_be_exported(run, tmp_path, capsys):
    folder = tmp_path / "last"
    flags = ("--run_seed=2", "--checkpoint=last", "--documents=0", f"--workdir={folder}")
    assert command(f"--run={run}", *flags) == 0
    assert "0 documents of validation" in capsys.readouterr().out
    own, wanted = (protot_jax.load_run(x, seed=2, best=False) for x in (folder, run))
    assert own.step == wanted.step == 4
    reported = json.loads((folder / "summary.json").read_text("utf-8"))["seeds"][0]["last"]
    card = (folder / "README.md").read_text("utf-8")
    assert "the last weights, after 4 updates" in card
    assert (
        "--run=THIS_FOLDER --checkpoint=last` or `protot_jax.load_run(folder, best=False)" in card
    )
    shown = over_seeds([reported["validation_perplexity"]])
    assert f"| validation perplexity, last weights | {shown} |" in card
    jax.tree.map(np.testing.assert_array_equal, own.params, wanted.params)
    with pytest.raises(UsageError, match="has the last weights alone, of step 4"):
        protot_jax.load_run(folder)
    # The best and the last weights of seed 1 are the same.
    folder = tmp_path / "both"
    assert command(f"--run={run}", "--documents=0", f"--workdir={folder}") == 0
    assert protot_jax.load_run(folder, best=False).step == protot_jax.load_run(folder).step == 4


def test_nothing_is_written_where_something_is_or_a_run_has_not_ended(
    run, folder, tmp_path, capsys
):
    assert command(f"--run={run}", f"--workdir={folder}") == 3
    assert "exists; name a folder that does not" in capsys.readouterr().err
    assert command(f"--run={folder}", f"--workdir={tmp_path / 'again'}") == 3
    assert "is an exported model already" in capsys.readouterr().err
    # As of a run that goes on, which keeps the summary of its earlier end.
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "finished.json").unlink()
    assert command(f"--run={unfinished}", f"--workdir={tmp_path / 'new'}") == 3
    assert "has not ended; start the run again" in capsys.readouterr().err
    assert command(f"--run={run}") == 2
    assert not (tmp_path / "again").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "data/tokenizer.json"])
def test_a_changed_byte_is_found_and_named(copy, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises((CorruptError, BadInputError), match=name):
        protot_jax.load_run(copy)


def test_a_config_of_another_export_is_named_as_a_changed_file(copy):
    config = (copy / "config.json").read_text("utf-8")
    (copy / "config.json").write_text(config.replace('"document"', '"doctment"'), "utf-8")
    with pytest.raises(CorruptError, match=r"config\.json"):
        protot_jax.load_run(copy)


def test_weights_of_another_model_are_refused(copy):
    """Each file is whole, and they do not belong together."""
    tensors = load_file(copy / "model.safetensors")
    name = "blocks/mixer/prototypes"
    save_file(tensors | {name: tensors[name][:, :2].copy()}, copy / "model.safetensors")
    sealed(copy)
    with pytest.raises(BadInputError, match=rf"{name} is float32\[2, 2, \d+\], not float32"):
        protot_jax.load_run(copy)
    del tensors[name]
    save_file(tensors, copy / "model.safetensors")
    sealed(copy)
    with pytest.raises(BadInputError, match=f"of different models: {name} are parameters"):
        protot_jax.load_run(copy)


def test_a_manifest_of_another_version_says_what_to_do(copy):
    manifest = json.loads((copy / "export.json").read_text("utf-8"))
    manifest = {k: v for k, v in manifest.items() if k != "sha256"} | {"format": 2}
    write_json(copy / "export.json", manifest | {"sha256": content_digest(manifest)})
    with pytest.raises(BadInputError, match="format 2 is not 1; export the model again"):
        protot_jax.load_run(copy)


def test_it_is_not_trained_and_not_changed_by_trying(copy):
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    config = ConfigDict(json.loads((copy / "config.json").read_text("utf-8")))
    for resume in ("auto", "force"):
        with pytest.raises(UsageError, match="is an exported model, which cannot be trained"):
            run_in(config, copy, resume=resume)
    assert before == {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    assert protot_jax.load_run(copy).step == 2


def test_an_autoencoder_needs_the_run(run, folder):
    first = protot_jax.load_run(run, seed=2)
    with pytest.raises(UsageError, match="an exported model has none; name its run"):
        units.load([f"sae:{folder}"], first)
    (compared,) = units.load([f"sae:{run / 'seed_2'}"], first)
    assert compared.model.seed == 2


def test_a_judge_knows_it_for_a_part_of_the_same_data(run, folder):
    """A run and its export have the same documents; other data are others."""
    own, part = (read_json(place / saved_run.DATA / MANIFEST) for place in (run, folder))
    assert judging.data_identity(own) == judging.data_identity(part)
    assert judging.data_identity(own | {"documents_sha256": "0"}) != judging.data_identity(part)
    assert judging.data_identity(own | {"tokenizer_sha256": "0"}) != judging.data_identity(part)
