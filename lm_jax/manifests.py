"""Digests of files, and of the manifest that lists them."""

import hashlib
import json
from pathlib import Path
from typing import Any


def file_digest(file: Path) -> dict[str, Any]:
    """The size in bytes and the sha256 of a file, as a manifest holds them."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"size": file.stat().st_size, "sha256": digest}


def own_digest(manifest: Any) -> str:
    """The sha256 of a manifest without its own entry of that name."""
    return hashlib.sha256(
        json.dumps(manifest, sort_keys=True, allow_nan=False).encode()
    ).hexdigest()
