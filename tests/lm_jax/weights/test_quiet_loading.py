"""Loading a model writes nothing on the console, not even a library's advice."""

import os
import shutil
import subprocess
import sys

import tokenizers

from tools.make_goldens import GOLDEN


def load(folder, then="", **environment):
    code = f"import sys, lm_jax; lm_jax.load_pretrained(sys.argv[1]){then}"
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )


def test_a_tokenizer_is_loaded_without_a_word(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_mqa", folder)
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    done = load(folder, ".tokenizer.encode('a b')")
    assert (done.stdout, done.stderr) == ("", "")


def test_warnings_of_a_config_are_left_out_unless_asked_for():
    # It names tokens beyond its vocabulary.
    done = load(GOLDEN / "gpt2")
    assert (done.stdout, done.stderr) == ("", "")
    asked = load(GOLDEN / "gpt2", TRANSFORMERS_VERBOSITY="warning")
    assert "Model config" in asked.stderr
