"""Real weights and corpora, pinned by version and sha256: their manifest, and the user's cache.

assets.fetch("smollm2")
assets.path("smollm2", assets.models()["smollm2"])
"""

from lm_jax.assets.manifest import Archive, Asset, Member, entries
from lm_jax.assets.store import cached, entry, fetch, licence_note, models, path, verify

__all__ = [
    "Archive",
    "Asset",
    "Member",
    "cached",
    "entries",
    "entry",
    "fetch",
    "licence_note",
    "models",
    "path",
    "verify",
]
