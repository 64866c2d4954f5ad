"""Jacobian lenses as files: safetensors `J_<l>` [D, D] of each block but the last, in float16."""

import json
from pathlib import Path

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.inspect.jacobian_lens import SKIPPED, JacobianLens
from lm_jax.run.files import write_bytes

_ESTIMATOR, _ABOUT = "rows in turn", "about"


def save_lens(path: str | Path, lens: JacobianLens) -> None:
    """Writes a lens as safetensors: J_<l> [D, D] of each block in float16, and what it is of.

    Raises:
      StorageError: the file cannot be written.
    """
    from safetensors.numpy import save as to_bytes

    tensors = {f"J_{layer}": x.astype(np.float16) for layer, x in enumerate(lens.matrix_SDD)}
    about = {
        "estimator": _ESTIMATOR,
        "n_prompts": lens.prompts,
        "rows": lens.rows,
        "source_layers": list(range(lens.layers - 1)),
        "target_layer": lens.layers - 1,
        "d_model": lens.matrix_SDD.shape[-1],
        "skip_first_positions": lens.skipped,
        "spread": [None if np.isnan(x) else float(x) for x in lens.spread_S],
        "model": lens.model,
    }
    # One entry, as the order of several is another one each time.
    write_bytes(path, to_bytes(tensors, metadata={_ABOUT: json.dumps(about)}))


def load_lens(path: str | Path) -> JacobianLens:
    """Reads a lens that `save_lens` wrote, or a published one after its conversion.

    Published ones are pickles, which are never opened here. In an environment with torch,

        raw = torch.load("lens.pt", weights_only=True, map_location="cpu")
        tensors = {f"J_{l}": m.contiguous() for l, m in raw["J"].items()}
        about = {k: json.dumps(raw[k]) for k in ("n_prompts", "source_layers", "d_model")}
        safetensors.torch.save_file(tensors, "lens.safetensors", metadata=about)

    writes the same matrices as a file that is read here.

    Raises:
      BadInputError: it is no such file, or of some layers alone.
      CorruptError: it is damaged, or a matrix is missing or misshapen.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        raise BadInputError(
            f"{path} is no .safetensors file of a lens; a published lens is a pickle, which is "
            "never opened here: convert it as lm_jax.weights.lenses.load_lens says"
        )
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            raw = file.metadata() or {}
    except SafetensorError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    raw.pop("format", None)
    about = {name: json.loads(value) for name, value in raw.items()}
    about |= about.pop(_ABOUT, {})
    S = len(tensors)
    if set(tensors) != {f"J_{layer}" for layer in range(S)} or not S:
        raise BadInputError(
            f"{path} holds {', '.join(sorted(tensors)[:4])}, and a lens has J_0 and so on to the "
            "layer before the last; give one of all layers"
        )
    D = tensors["J_0"].shape[-1]
    for name, x in tensors.items():
        if x.shape != (D, D) or not np.isfinite(x).all():
            raise CorruptError(f"{path}: {name} is of shape {x.shape}, or not finite")
    target = about.get("target_layer")
    if target is not None and target != S:
        raise BadInputError(
            f"{path}: target_layer is {target}, and only lenses of the last layer are read ({S})"
        )
    spread = about.get("spread") or [None] * S
    return JacobianLens(
        matrix_SDD=np.stack([tensors[f"J_{layer}"] for layer in range(S)]).astype(np.float32),
        layers=S + 1,
        prompts=int(about.get("n_prompts", 0)),
        rows=int(about.get("rows", D)),
        skipped=int(about.get("skip_first_positions", about.get("skip_first", SKIPPED))),
        spread_S=np.array([np.nan if x is None else x for x in spread]),
        model=str(about.get("model") or ""),
    )
