"""Head patching of TransformerLens in an environment of its own: `patching_lens` starts it.

    python lens.py FOLDER      with the interpreter of that environment

FOLDER holds `model.npz`, the weights by the names of TransformerLens, `prompts.npz` and
`settings.json`, the fields of `HookedTransformerConfig`. It writes a line of JSON with the versions
and then, for each line that it reads, patches every head of every layer
(`patching.get_act_patch_attn_head_out_all_pos`) and writes the mean metric under each with the
seconds, wall and CPU, that all of them took. No part of this repository is imported.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
from pathlib import Path
import platform
import sys
import time

import numpy as np


def main() -> None:
    """The worker."""
    folder = Path(sys.argv[1])
    # The library prints progress.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch = importlib.import_module("torch")
        transformer_lens = importlib.import_module("transformer_lens")
        patching = importlib.import_module("transformer_lens.patching")
        torch.set_grad_enabled(False)
        settings = json.loads((folder / "settings.json").read_text())
        model = transformer_lens.HookedTransformer(
            transformer_lens.HookedTransformerConfig(**settings)
        )
        weights = np.load(folder / "model.npz")
        given = {name: torch.from_numpy(weights[name]) for name in weights.files}
        absent, unknown = model.load_state_dict(given, strict=False)
        # What is left as it was are biases, which are 0, and constants.
        left = {name.rpartition(".")[2].lstrip("_") for name in absent}
        constants = {"mask", "IGNORE", "rotary_sin", "rotary_cos"}
        assert not unknown and all(x.startswith("b_") or x in constants for x in left), left
        arrays = np.load(folder / "prompts.npz")
        prompts = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        clean, corrupt = prompts["clean"].long(), prompts["corrupt"].long()
        rows = torch.arange(len(clean))

        def metric(logits):
            at = logits[rows, prompts["position"]]
            return (at[rows, prompts["right"]] - at[rows, prompts["wrong"]]).mean()

        before = float(metric(model(corrupt)))
        names = ("transformer-lens", "torch", "transformers", "numpy")
        versions = {name: _version(name) for name in names}
    _say({"versions": versions | {"python": platform.python_version()}, "before": before})
    for _ in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            wall, cpu = time.perf_counter(), time.process_time()
            _, cache = model.run_with_cache(clean, names_filter=lambda name: name.endswith("z"))
            found = patching.get_act_patch_attn_head_out_all_pos(model, corrupt, cache, metric)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        _say({"metric": found.tolist(), "wall": wall, "cpu": cpu})


def _version(name: str) -> str:
    return importlib.metadata.version(name)


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
