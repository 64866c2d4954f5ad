"""What the command refuses: in one sentence with the remedy, before a folder is made."""

import dataclasses

import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError
from sparse_jax.studies.graphs import inputs
from sparse_jax.studies.graphs.settings import GraphConfig
from tests.sparse_jax.graphs.small_command import PROMPTS, run, save_all, save_transcoder


def test_bad_input_is_one_sentence_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    models = save_all(tmp_path / "models")
    model = lm_jax.load_pretrained(models / "dense")
    made = {
        "other": {"sha256": "ab" * 32},
        "unknown": {"sha256": ""},
        "deeper": {"layers": 3},
        "silent": {"change": lambda p: p | {"encoder_bias": p["encoder_bias"] - 1e6}},
        "empty": {"change": lambda p: p | {"decoder": {k: 0 * x for k, x in p["decoder"].items()}}},
        "nan": {"change": lambda p: p | {"decoder_bias": p["decoder_bias"] * np.nan}},
    }
    for name, options in made.items():
        save_transcoder(tmp_path / name, model, **options)
    (tmp_path / "labels.json").write_text('{"1-2": "dates"}', "utf-8")
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "slug": "x"}\n' * 2, "utf-8")
    (tmp_path / "typo.jsonl").write_text('{"promt": "a"}', "utf-8")
    dense, prompt = f"--model={models / 'dense'}", f"--prompt={PROMPTS[0]}"

    def clt(name):
        return f"--transcoder={tmp_path / name}"

    own = f"--transcoder={models / 'dense_clt'}"
    cases = [
        ([dense, clt("other"), prompt], 3, "with weights abababababab, not"),
        ([dense, clt("unknown"), prompt], 3, "there is too little text to try it on (text:"),
        ([dense, clt("deeper"), prompt], 2, "its num_layers is 3, but that of the model is 2"),
        ([dense, clt("silent"), prompt], 2, "none of the features of"),
        ([dense, clt("empty"), prompt], 3, "all decoders are zero"),
        ([dense, clt("nan"), prompt], 7, "b_dec_0 has values that are not finite"),
        ([dense, own, f"--prompt={'park ' * 65}"], 2, "has 65 tokens, and the model a context of"),
        ([dense, own, prompt, "--target= John Mary"], 3, "is not one token after"),
        ([dense, own, prompt, "--target= John", "--target= John"], 2, "name a token twice"),
        ([dense, own, prompt, f"--labels={tmp_path / 'labels.json'}"], 3, "is no label; write"),
        ([dense, own, f"--prompts={tmp_path / 'two.jsonl'}"], 2, "two prompts have the slug 'x'"),
        (
            [dense, own, f"--prompts={tmp_path / 'typo.jsonl'}"],
            3,
            "typo.jsonl:1: prompt is missing",
        ),
        (
            [dense, own, f"--prompts={tmp_path / 'none.jsonl'}"],
            3,
            "No such file or directory; give",
        ),
        ([dense, own], 2, "there is no prompt; give --prompt=TEXT or --prompts=FILE.jsonl"),
        ([dense, prompt], 2, "--transcoder is missing; name the folder transcoder/"),
        ([own, prompt], 2, "--model is missing; name a folder"),
        ([dense, own, "--neurons", prompt], 2, "--neurons with --transcoder: the features are"),
        (["--neurons", prompt], 2, "--model is missing; name a folder"),
        (
            [dense, own, "--sparse_transcoder=x", prompt],
            2,
            "--sparse is missing; name the",
        ),
        ([dense, own, f"--sparse={models}", prompt], 2, "give --model alone, or --dense and"),
        ([dense, own, "--dense_labels=x", prompt], 2, "--dense is missing; name the model of"),
        (
            ["--dense=x", "--sparse=x", "--neurons", "--labels=x", prompt],
            2,
            "each model has features of its own; give --dense_labels and --sparse_labels",
        ),
        ([dense, own, prompt, "--edge_threshold=0"], 2, "--edge_threshold=0.0 must be above 0"),
        ([dense, own, prompt, "--judge=locl:x"], 2, "judge = 'locl:x' is unknown; did you mean"),
        (
            [dense, own, prompt, "--judge=cached:none.jsonl"],
            3,
            "is not a file of answers; name one",
        ),
        ([dense, own, prompt, "--judge=local:none"], 3, "none"),
        ([dense, own, prompt, "--config.factors=()"], 2, "config.factors = () must be finite"),
        ([dense, own, "--promt=a"], 2, "--promt is not a flag of this command; did you mean"),
    ]
    for arguments, code, message in cases:
        folder = tmp_path / "run"
        assert run(*arguments, "--config.corpus.source=", f"--workdir={folder}") == code, message
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error, error
        assert not folder.exists()
    # The flag accepts what says nothing, and nothing else.
    refused = [dense, clt("other"), prompt, "--unknown_origin", f"--workdir={tmp_path / 'run'}"]
    assert run(*refused) == 3
    config = GraphConfig(
        model=str(models / "dense"),
        transcoder=str(tmp_path / "unknown"),
        prompts=PROMPTS[:1],
        unknown_origin=True,
        corpus=dataclasses.replace(GraphConfig().corpus, source=""),
    )
    facts = inputs.read(config).models["model"].facts
    assert not facts.same_model and facts.unexplained == ()
    # On text it leaves out more than there is: its weights are random.
    tried = dataclasses.replace(
        config, corpus=dataclasses.replace(config.corpus, source=str(models / "text"))
    )
    facts = inputs.read(tried).models["model"].facts
    assert min(facts.unexplained) > 0.9 and len(facts.active) == len(facts.active_first) == 2
    said = r"leaves out .* % of the variance .* other readings leave out .* \(feature_input_hook"
    with pytest.raises(BadInputError, match=said):
        inputs.read(dataclasses.replace(tried, unknown_origin=False))
