"""Lenses as files.

A Jacobian lens is safetensors `J_<l>` [D, D] of each block but the last, in float16; a tuned lens
is `<i>.weight` [D, D] and `<i>.bias` [D] of each block.
"""

import json
from pathlib import Path

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.inspect.jacobian_lens import SKIPPED, JacobianLens
from lm_jax.inspect.tuned_lens import TunedLens
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
    path = Path(path)
    tensors, raw = _read(path, "load_lens")
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


def load_tuned(path: str | Path) -> TunedLens:
    """Reads a tuned lens after its conversion.

    Published ones are pickles, which are never opened here. In an environment with torch,

        raw = torch.load("params.pt", weights_only=True, map_location="cpu")
        tensors = {name: x.float().contiguous() for name, x in raw.items()}
        safetensors.torch.save_file(tensors, "tuned.safetensors")

    writes the same matrices as a file that is read here. In float32.

    Raises:
      BadInputError: it is no such file, or of some layers alone.
      CorruptError: it is damaged, or a tensor is misshapen or not finite.
    """
    path = Path(path)
    tensors, _ = _read(path, "load_tuned")
    L = len(tensors) // 2
    names = {f"{layer}.{part}" for layer in range(L) for part in ("weight", "bias")}
    if set(tensors) != names or not L:
        raise BadInputError(
            f"{path} holds {', '.join(sorted(tensors)[:4])}, and a tuned lens has 0.weight, 0.bias "
            "and so on of every block; give one of all blocks"
        )
    D = tensors["0.bias"].size
    for name, x in tensors.items():
        if x.shape != ((D, D) if name.endswith("weight") else (D,)) or not np.isfinite(x).all():
            raise CorruptError(f"{path}: {name} is of shape {x.shape}, or not finite")
    weight_LDD, bias_LD = (
        np.stack([tensors[f"{layer}.{part}"] for layer in range(L)]).astype(np.float32)
        for part in ("weight", "bias")
    )
    return TunedLens(weight_LDD, bias_LD)


def _read(path: Path, reader: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a file that a function of this module reads."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors" or not path.is_file():
        raise BadInputError(
            f"{path} is no .safetensors file of a lens; a published lens is a pickle, which is "
            f"never opened here: convert it as lm_jax.weights.lenses.{reader} says"
        )
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except SafetensorError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
