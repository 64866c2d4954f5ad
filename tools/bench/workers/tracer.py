"""Graphs of circuit-tracer in an environment of its own: `graphs_tracer` starts it.

    python tracer.py FOLDER      with the interpreter of that environment

FOLDER holds `model.npz`, the weights by the names of TransformerLens, `settings.json`, the fields
of `HookedTransformerConfig`, `dictionary/`, a cross-layer transcoder, and `tokens.npy`. It writes a
line of JSON with the versions. Then it reads lines with a batch size each, makes the graph of the
prompt with all rows, and writes its seconds, wall and CPU; the first graph is kept as `active.npy`
and `adjacency.npy`. No part of this repository is imported.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
from pathlib import Path
import platform
import sys
import time
from typing import Any

import numpy as np


def main() -> None:
    """The worker."""
    folder = Path(sys.argv[1])
    # The libraries print progress.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch = importlib.import_module("torch")
        torch.set_num_threads(os.cpu_count() or 1)
        model = _model(folder, torch)
        attribute = importlib.import_module("circuit_tracer.attribution.attribute").attribute
        tokens = torch.from_numpy(np.load(folder / "tokens.npy")).long()
        packages = ("circuit-tracer", "transformer-lens", "torch", "transformers", "numpy")
        versions = {name: importlib.metadata.version(name) for name in packages}
    _say({"versions": versions | {"python": platform.python_version()}})
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            wall, cpu = time.perf_counter(), time.process_time()
            graph = attribute(tokens, model, batch_size=int(line))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if not (folder / "active.npy").exists():
                np.save(folder / "adjacency.npy", graph.adjacency_matrix.numpy())
                np.save(folder / "active.npy", graph.active_features.numpy())
        _say({"wall": wall, "cpu": cpu})


def _model(folder: Path, torch: Any) -> Any:
    """The model with the dictionary in the place of its MLPs."""
    lens = importlib.import_module("transformer_lens")
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    clt = importlib.import_module("circuit_tracer.transcoder.cross_layer_transcoder")
    replaced = importlib.import_module(
        "circuit_tracer.replacement_model.replacement_model_transformerlens"
    )
    settings = json.loads((folder / "settings.json").read_text())
    cfg = lens.HookedTransformerConfig(
        **settings, model_name="random", dtype=torch.float32, default_prepend_bos=False
    )
    dictionary = clt.load_clt(
        str(folder / "dictionary"),
        feature_input_hook="mlp.hook_in",
        feature_output_hook="hook_mlp_out",
        scan="random",
        device=torch.device("cpu"),
        dtype=torch.float32,
        lazy_decoder=False,
    )
    # Token number i is the word t<i>; t0 is the special first one that the library asks for.
    words = {f"t{i}": i for i in range(cfg.d_vocab)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        name_or_path="random",
        add_bos_token=True,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "t0"),
    )
    made = replaced.TransformerLensReplacementModel.from_config(
        cfg, dictionary, tokenizer=tokenizer
    )
    own, stored = made.state_dict(), np.load(folder / "model.npz")
    with torch.no_grad():
        for name in stored.files:
            # Its wrappers of MLPs and of the unembedding hold those of TransformerLens.
            inner = name.replace(".mlp.", ".mlp.old_mlp.")
            inner = inner.replace("unembed.", "unembed.old_unembed.")
            own[inner].copy_(torch.from_numpy(stored[name]))
        for name, value in own.items():
            if name.rpartition(".")[2].lstrip("_").startswith("b_") and "transcoders" not in name:
                value.zero_()
    return made


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
