"""The command that builds a subset: its flags, what it prints, and the flags of pretraining."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.console import cli
from protot_jax.training import subset
from tests.protot_jax.small_runs import WORDS


def launched(*flags):
    return cli.run(subset.main, ["subset", *flags], options=subset.Options)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    texts = [f"{i} {' '.join(WORDS)} {' '.join(WORDS[: i % 12])}" for i in range(60)]
    table = pa.table({"text": texts, "id": [f"<{i}>" for i in range(60)]})
    pq.write_table(table, folder / "000.parquet")
    return folder


def test_it_builds_says_so_and_refuses_other_settings(source, tmp_path, capsys):
    flags = (f"--source={source}", "--documents=40,6,4", "--vocab_size=80", "--dump=sample")
    folder = tmp_path / "subset"
    assert launched(*flags, f"--workdir={folder}") == 0
    text = capsys.readouterr().out
    manifest = json.loads((folder / "subset.json").read_text())
    assert manifest["ids_sha256"] in text and "dumps: sample" in text
    assert [row.split()[1] for row in text.splitlines() if row.startswith(("train", "test"))] == [
        "40",
        "4",
    ]
    lines = dict(
        line.split("=", 1) for line in text.splitlines() if line.startswith("--config.corpus")
    )
    assert eval(lines["--config.corpus.splits"].strip('"')) == tuple(manifest["shares"])
    assert lines["--config.corpus.source"] == str(folder)
    assert launched(*flags, f"--workdir={folder}") == 0
    assert capsys.readouterr().out.startswith("finished before")
    assert launched(*flags, "--seed=1", f"--workdir={folder}") == 2
    assert "built with other settings" in capsys.readouterr().err


@pytest.mark.parametrize("documents", ["40,6", "40,6,x"])
def test_numbers_of_documents_are_three(source, documents, tmp_path, capsys):
    assert (
        launched(f"--source={source}", f"--documents={documents}", f"--workdir={tmp_path}/s") == 2
    )
    assert "must be three numbers, such as 338695,18015,3603" in capsys.readouterr().err
