"""Provenance of a run: code, packages, device, seeds and hashes, in a JSON file."""

from collections.abc import Mapping
import contextlib
import datetime
import importlib.metadata
from pathlib import Path
import platform
import shlex
import subprocess
import sys
from typing import Any

from lm_jax.run.files import read_json, write_json

PROVENANCE_FILE = "provenance.json"
_PACKAGES = (
    "interpretable-attention-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "ml-collections",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "scipy",
    "pyarrow",
)


def utc_now() -> str:
    """The time in UTC, in ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def collect_provenance(
    *,
    seeds: Mapping[str, int] | None = None,
    dtype: str | None = None,
    data: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Returns the provenance of this run: everything needed to repeat it.

    Args:
      seeds: every random seed, by the name of what uses it.
      dtype: the dtype of the computation.
      data: sha256 of every data and weight file or set, by name.
      tokenizer: sha256 of the tokenizer file.
    """
    return {
        "start": utc_now(),
        "command": _command(),
        "git": _git(Path(__file__).parent),
        "packages": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "device": _device(),
        "dtype": dtype,
        "seeds": dict(seeds or {}),
        "data": dict(data or {}),
        "tokenizer": tokenizer,
    }


def record_provenance(folder: Path, entry: Mapping[str, Any]) -> None:
    """Writes `provenance.json`: the first start's entry, with later ones under `restarts`."""
    path = folder / PROVENANCE_FILE
    if path.exists():
        first = read_json(path)
        entry = first | {"restarts": [*first["restarts"], dict(entry)]}
    else:
        entry = {**entry, "restarts": []}
    write_json(path, entry)


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    # A result is passed on with its provenance; the name of somebody's home is not part of it.
    home = str(Path.home())
    return shlex.join(argument.replace(home, "~") for argument in [*program, *sys.argv[1:]])


def _git(source: Path) -> dict[str, Any] | None:
    """Returns the commit of the code in `source` and whether it was changed; None if untracked."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        # A package installed below somebody's checkout is no part of that checkout.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _device() -> dict[str, Any] | None:
    # A command that never loaded JAX has used no device, and must not wake one to say so.
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }
