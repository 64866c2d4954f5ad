"""What the files of a Hugging Face folder say of its tokenizer besides tokenizer.json."""

from collections.abc import Iterable, Mapping
import json
from pathlib import Path
from typing import Any

import tokenizers

from lm_jax.errors import BadInputError

GENERATION_CONFIG = "generation_config.json"
# Fields of a tokenizer that name the end of a text, of a turn and of a message.
_ENDS = ("eos_token", "eot_token", "eom_token")


def special_id(
    folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], kind: str
) -> int | None:
    """The id that begins ("bos") or ends ("eos") a text, or None."""
    key = f"{kind}_token"
    if (i := _named_id(folder, backend, config, key)) is not None:
        return i
    # Several models list more than one EOS, the main one first.
    return next(iter(_listed_ids(folder / "config.json", f"{key}_id")), None)


def _named_id(
    folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], key: str
) -> int | None:
    """The id of the token that the files of a tokenizer name as `key`, or None."""
    nested = (
        config.get(name) for name in ("model_specific_special_tokens", "extra_special_tokens")
    )
    groups = [config, *(each for each in nested if isinstance(each, Mapping))]
    groups.append(read_object(folder / "special_tokens_map.json"))
    named = next((group[key] for group in groups if group.get(key)), None)
    if named is None:
        return None
    token = named["content"] if isinstance(named, Mapping) else named
    i = backend.token_to_id(token)
    if i is None:
        raise BadInputError(
            f"{folder}: {key} {token!r} is not in tokenizer.json; take both files from one model"
        )
    return i


def _listed_ids(path: Path, key: str) -> list[int]:
    """The ids of a field that holds one id, a list of them, or nothing."""
    config = read_object(path)
    text = config.get("text_config")
    value = config.get(key)
    if value is None and isinstance(text, Mapping):
        value = text.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise BadInputError(f"{path}: {key} = {value!r} must be a token id or a list of token ids")
    return listed


def stop_ids(
    folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], eos_id: int | None
) -> tuple[int, ...]:
    """The ids beside `eos_id` that end a text, by the files of a folder."""
    ids = [_named_id(folder, backend, config, key) for key in _ENDS]
    for name in (GENERATION_CONFIG, "config.json"):
        ids += _listed_ids(folder / name, "eos_token_id")
    known = (i for i in ids if i is not None and i >= 0 and backend.id_to_token(i) is not None)
    return other_ids(known, eos_id)


def other_ids(ids: Iterable[int | None], eos_id: int | None) -> tuple[int, ...]:
    """The ids in their order, each once, without None and `eos_id`."""
    return tuple(dict.fromkeys(i for i in ids if i is not None and i != eos_id))


def chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template of a chat, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


def read_object(path: Path) -> dict[str, Any]:
    """A json object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise BadInputError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return data
