"""The identity of a model (`lm_jax.run.identity`): what its digests are of.

Of a configuration it is what was read that counts, not how config.json spells it: fields at their
defaults are left out, so that a later version with a further field has the same digests; whole
numbers are equal however written; and settings that decide nothing are left out. `max_length` is
one that counts: longer texts are cut to it. So does `family`, which says how tensors are read.
"""

from collections.abc import Iterable
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from lm_jax.model.config import DecoderConfig
from lm_jax.run.config import config_hash
from lm_jax.run.identity import ModelIdentity
from lm_jax.text.tokenizer import Tokenizer


def identify(
    cfg: DecoderConfig, tokenizer: Tokenizer | None, weights: str, *others: Any
) -> ModelIdentity:
    """The identity of a model with these parts.

    Args:
      cfg: the model's configuration.
      tokenizer: the model's tokenizer; None where it has none.
      weights: the digest of its weights.
      *others: what else decides its forward pass, such as a mixer, as `config_digest` takes it.
    """
    template = tokenizer.chat_template if tokenizer else None
    return ModelIdentity(
        weights,
        config_digest(cfg, *others),
        tokenizer_digest(tokenizer) if tokenizer else "",
        hashlib.sha256(template.encode()).hexdigest() if template else "",
    )


def weights_digest(files: Iterable[Path]) -> str:
    """Digest over weight files, in order of their names; their folders do not count."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda file: file.name):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def config_digest(cfg: DecoderConfig, *others: Any) -> str:
    """Digest of a configuration in canonical form; of `others` too, dataclasses or plain data."""
    return config_hash([canonical(each) for each in (_simplest(cfg), *others)])


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest of what a tokenizer does: its serialised state and its special ids."""
    special = {
        field.name: getattr(tokenizer, field.name)
        for field in dataclasses.fields(tokenizer)
        if field.name not in ("backend", "chat_template")
    }
    given = {name: value for name, value in special.items() if value not in (None, ())}
    return config_hash({"state": tokenizer.sha256, "special": canonical(given)})


def _simplest(cfg: DecoderConfig) -> DecoderConfig:
    """The configuration of the same forward pass with the fewest fields that are given."""
    # The row of padding starts at zero in training; read weights have what they have.
    changes: dict[str, Any] = {"pad_id": None}
    if not any(cfg.windows):
        changes["windows"] = ()
    if not any(cfg.windows) or cfg.local_rope == cfg.rope:
        changes["local_rope"] = None
    widths = {shape.head_dim or cfg.head_dim for shape in cfg.layers} | {cfg.head_dim}
    if widths == {cfg.head_dim} and cfg.attention_scale == cfg.head_dim**-0.5:
        changes["attention_scale"] = None
    return dataclasses.replace(cfg, **changes)


def canonical(value: Any) -> Any:
    """Plain data that is equal for equal settings, dataclasses or plain data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: plain
            for field in dataclasses.fields(value)
            # Functions compute the same in another way.
            if not callable(getattr(value, field.name))
            and (plain := canonical(getattr(value, field.name))) != _default(field)
        }
        return {"kind": type(value).__name__} | given
    if isinstance(value, dict):
        return {name: canonical(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field in canonical form; a field without one differs from every value."""
    if field.default is not dataclasses.MISSING:
        return canonical(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return canonical(field.default_factory())
    return dataclasses.MISSING
