"""The benchmark beside TransformerLens, with our own loop in the place of its process."""

import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits.runs import metric
from tests import tiny
from tests.sparse_jax.circuits.small_study import HEADS, LAYERS, save_models
from tools.bench import patching as bench_patching
from tools.bench import patching_lens

# Run by `make test-all`.
pytestmark = pytest.mark.long


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A command line for a small model; the process is a loop of whole passes, plus `shift`."""
    models = save_models(tmp_path)
    given = []

    class Loop:
        shift = 0.0

        def __init__(self, python, folder):
            assert python == "lens/bin/python"
            self.stored = np.load(folder / "model.npz")
            model, batch = given
            before_B = metric(model, batch, batch.corrupt_BT)
            self.started = {"versions": {"torch": "0"}, "before": float(before_B.mean())}

        def run(self):
            model, batch = given
            swapped = batch.replace(clean_BT=batch.corrupt_BT, corrupt_BT=batch.clean_BT)
            mean_LN = bench_patching.loop(model, swapped).mean(-1)
            found = mean_LN + self.started["before"] + self.shift
            return {"metric": found.tolist(), "wall": 1.0, "cpu": 2.0}

        def close(self):
            assert self.stored["blocks.1.attn._W_K"].shape == (2, 16, 8)

    real = patching_lens.write

    def write(folder, model, batch):
        given[:] = model, batch
        real(folder, model, batch)

    monkeypatch.setattr(patching_lens, "write", write)
    monkeypatch.setattr(patching_lens, "start", Loop)
    command = ["--python=lens/bin/python", f"--model={models / 'dense'}", "--prompts=3"]
    return [*command, "--repeats=2"], Loop


def test_both_are_compared_and_timed(asked, capsys):
    command, _ = asked
    assert patching_lens.main(command) == 0
    printed = capsys.readouterr().out
    assert f"{LAYERS * HEADS} heads x 3 prompts" in printed
    assert "CPU seconds: TransformerLens 2.00, ours" in printed


def test_other_effects_are_not_timed(asked, capsys):
    command, loop = asked
    loop.shift = 0.01
    assert patching_lens.main(command) == 1
    assert "heads: not timed, as mean effects differ by 1.0e-02" in capsys.readouterr().out


def test_a_model_of_other_blocks_is_refused():
    with pytest.raises(UsageError, match="its blocks are not those of Llama"):
        patching_lens.settings(tiny.decoder(**tiny.GPT2))
