"""Tokenizers without torch or transformers: a thin frozen class around `tokenizers.Tokenizer`.

Two sources. A Hugging Face folder has tokenizer.json, which is read as it is. A GGUF file has only
the vocabulary and some flags, from which `gguf_tokenizer` builds the pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
from pathlib import Path
import threading
from typing import Any, Protocol

import tokenizers
from tokenizers import processors

from lm_jax.errors import BadInputError
from lm_jax.run.files import storage_error, write_bytes, write_json
from lm_jax.text import gguf_tokenizer, tokenizer_files
from lm_jax.text.gguf_reader import contents, open_gguf

# One backend may be shared by threads, and its handling of special tokens is a switch on it.
_switch = threading.Lock()


# How a vocabulary of SentencePiece spells a space.
_SPACE = "\u2581"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. `bos_id`, `eos_id`, `chat_template` are None where there is none.

    `eos_id` is the main id that ends a text, and `other_stop_ids` are those that end one as well,
    such as the end of a turn of a chat; a generated text ends at any of `stop_ids`.

    `embedding_rows` is the number of rows of the embedding of the tokenizer's model where it has
    ids beyond them (`lm_jax.weights.load`), else None. A text with such an id is refused.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    chat_template: str | None = None
    other_stop_ids: tuple[int, ...] = ()
    embedding_rows: int | None = None

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a local Hugging Face folder.

        Special ids come from tokenizer_config.json, else special_tokens_map.json, else config.json.
        Truncation and padding that tokenizer.json may ask for are switched off.

        `stop_ids` are the union of every file that says what ends a text: eos_token, eot_token and
        eom_token of the tokenizer, and eos_token_id, one id or a list, of config.json and of
        generation_config.json. transformers 5 stops at the ids of generation_config.json alone, or
        of config.json where there is no such file, and never asks the tokenizer; whatever it stops
        at is in the union. An id that the tokenizer lacks cannot be generated and is left out.

        Raises:
          BadInputError: for no or unreadable tokenizer.json, a special token that it lacks, or an
            eos_token_id that is neither an id nor a list of ids.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise BadInputError(
                f"{folder}: no tokenizer.json; save one there with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise BadInputError(f"{file}: not a readable tokenizer ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        config = tokenizer_files.read_object(folder / "tokenizer_config.json")
        special = {
            kind: tokenizer_files.special_id(folder, backend, config, kind)
            for kind in ("bos", "eos")
        }
        _check_ids(special, backend.get_vocab_size(), folder)
        template = tokenizer_files.chat_template(folder, config)
        stops = tokenizer_files.stop_ids(folder, backend, config, special["eos"])
        tokenizer = cls(backend, special["bos"], special["eos"], template, stops)
        _apply_flags(tokenizer, config.get("add_bos_token"), config.get("add_eos_token"))
        return tokenizer

    @classmethod
    def from_gguf(cls, source: Any) -> "Tokenizer":
        """The tokenizer in a GGUF file, given as a path or an open `gguf.GGUFReader`.

        `stop_ids` are those of the fields eos_token_id, eot_token_id (end of a turn), eom_token_id
        (end of a message) and eos_token_ids (a list).

        Raises:
          BadInputError: for an unreadable file, a missing field, or a kind of tokenizer or
            splitting rule that is not among the supported ones.
        """
        reader = open_gguf(source) if isinstance(source, str | Path) else source
        fields = gguf_tokenizer.Fields(reader)
        backend = gguf_tokenizer.build(fields)
        special = {name: fields(f"{name}_token_id", None) for name in ("bos", "eos")}
        ends = {name: fields(f"{name}_token_id", None) for name in ("eot", "eom")}
        ends |= {f"eos_token_ids, {i}": i for i in fields("eos_token_ids", [])}
        _check_ids(special | ends, backend.get_vocab_size(), "GGUF")
        template = reader.fields.get("tokenizer.chat_template")
        tokenizer = cls(
            backend,
            special["bos"],
            special["eos"],
            contents(template) if template else None,
            tokenizer_files.other_ids(ends.values(), special["eos"]),
        )
        bos_default = gguf_tokenizer.begins_with_bos(fields)
        _apply_flags(
            tokenizer, fields("add_bos_token", bos_default), fields("add_eos_token", False)
        )
        return tokenizer

    @classmethod
    def from_pieces(cls, pieces: Sequence[str], scores: Sequence[float]) -> "Tokenizer":
        """The tokenizer of a SentencePiece vocabulary with byte fallback, as Llama 2 has it.

        Args:
          pieces: text of each token, with U+2581 for a space; the first three are for what is
            unknown, and for the beginning and the end of a text.
          scores: score of each piece; the best pair of neighbours is joined first.

        Raises:
          BadInputError: bytes are missing, or a piece is there twice.
        """
        backend = gguf_tokenizer.sentencepiece(pieces, scores)
        tokenizer = cls(backend, bos_id=1, eos_id=2)
        _apply_flags(tokenizer, add_bos=True, add_eos=False)
        return tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, `eos_id` first; empty where nothing does."""
        return (() if self.eos_id is None else (self.eos_id,)) + self.other_stop_ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; ids are in 0..vocab_size-1.

        Those without a row in the embedding are not counted.
        """
        count = self.backend.get_vocab_size()
        return count if self.embedding_rows is None else min(count, self.embedding_rows)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the canonical tokenizer json; equal after `save` and `from_folder`."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Ids of a text.

        Args:
          text: any text without lone surrogates.
          add_special_tokens: whether to put BOS or EOS around it where the model was trained with
            them.
          split_special_tokens: whether to treat special-token strings inside `text` as plain text.
            Use it for text from outside, where `<|endoftext|>` must not become the token of that
            name.

        Raises:
          BadInputError: for a lone surrogate, which no UTF-8 text contains, or a token without a
            row in the embedding of the model.
        """
        return self.encoding(
            text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens
        ).ids

    def encoding(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> tokenizers.Encoding:
        """What `encode` has the ids of, which knows also the characters that each is of."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInputError(
                f"text: lone surrogate {text[error.start]!a} at character {error.start}; "
                "read the file as UTF-8"
            ) from error
        with _switch:
            self.backend.encode_special_tokens = split_special_tokens
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        self.check_rows(encoding.ids)
        return encoding

    def check_rows(self, ids: Sequence[int]) -> None:
        """Refuses ids that have no row in the embedding of the model.

        Raises:
          BadInputError: for such an id, with its token.
        """
        if self.embedding_rows is not None and max(ids, default=0) >= self.embedding_rows:
            i = next(i for i in ids if i >= self.embedding_rows)
            raise BadInputError(
                f"text: the token {self.token(i)!r} has the id {i}, and the embedding of the model "
                f"only {self.embedding_rows} rows; leave it out"
            )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids.

        Raises:
          BadInputError: for an id outside the vocabulary (the package would drop it).
        """
        ids = [int(i) for i in ids]
        for i in ids:
            self.token(i)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def piece(self, i: int) -> str:
        """Text of a token inside of a text.

        A vocabulary of SentencePiece has a space in front of a word's first token, which `decode`
        leaves out at the beginning of a text.

        Raises:
          BadInputError: for an id outside the vocabulary.
        """
        token = self.token(i)
        return token.replace(_SPACE, " ") if token.startswith(_SPACE) else self.decode([i])

    def token(self, i: int) -> str:
        """The token of an id as the vocabulary spells it.

        Raises:
          BadInputError: for an id outside the vocabulary.
        """
        token = self.backend.id_to_token(int(i)) if i >= 0 else None
        if token is None:
            raise BadInputError(
                f"token id {i} is not in the vocabulary of {self.vocab_size} tokens"
            )
        return token

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json for `transformers.AutoTokenizer`.

        Where several ids end a text, generation_config.json lists them, as transformers reads it.

        Raises:
          StorageError: if the folder cannot be written.
        """
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for kind, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            # transformers invents `<s>` and `</s>` for a name that is absent, but takes null.
            config[kind] = None if i is None else self.token(i)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(folder, error) from error
        write_bytes(folder / "tokenizer.json", self.backend.to_str(pretty=True).encode())
        write_json(folder / "tokenizer_config.json", config)
        if self.other_stop_ids:
            write_json(
                folder / tokenizer_files.GENERATION_CONFIG, {"eos_token_id": list(self.stop_ids)}
            )


class Encodes(Protocol):
    """What turns text into ids, as `Tokenizer.encode`."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...


class DecodesToo(Encodes, Protocol):
    """What turns ids into text as well, as `Tokenizer.decode`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        ...


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on: with what begins a text, and without what ends it."""
    before, _ = added_tokens(tokenizer)
    return [*before, *tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)]


def added_tokens(tokenizer: Encodes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer puts before and after a text by default, such as BOS and EOS."""
    body = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    first = next(i for i in range(len(full)) if full[i : i + len(body)] == body)
    return tuple(full[:first]), tuple(full[first + len(body) :])


def continued_number(tokenizer: DecodesToo, prompt: str, last: int, text: str) -> list[int] | None:
    """The ids of digits that go on with a number at the end of a prompt, where they are cut there.

    A vocabulary may have " 1776" as one token, and a prompt that ends with the token " 17" can be
    continued by the token "76" all the same. So the digits are taken by themselves: after the last
    token of the prompt they must spell the same text, whatever the whole number would be.

    Args:
      tokenizer: the model's tokenizer.
      prompt: text before the digits.
      last: id of its last token.
      text: the digits.

    Returns:
      None where the prompt does not end with a digit, `text` is not digits alone, or the tokenizer
      puts something before digits by themselves, such as a space.
    """
    if not (prompt[-1:].isdecimal() and text.isdecimal()):
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if tokenizer.decode([last, *ids]) == tokenizer.decode([last]) + text else None


def _apply_flags(tokenizer: Tokenizer, add_bos: bool | None, add_eos: bool | None) -> None:
    """Puts BOS and EOS around texts as the flags say; None leaves that end as it is."""
    if add_bos is None and add_eos is None:
        return
    backend, text = tokenizer.backend, "a"
    ids, bare = (backend.encode(text, add_special_tokens=add).ids for add in (True, False))
    before = _wanted(tokenizer.bos_id, add_bos, ids[0])
    after = _wanted(tokenizer.eos_id, add_eos, ids[-1])
    if ids == [*before, *bare, *after]:
        return
    names = {i: tokenizer.token(i) for i in (*before, *after)}
    start, end = [names[i] for i in before], [names[i] for i in after]
    backend.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", *end],
        pair=[*start, "$A", *end, *start, "$B:1", *end],
        special_tokens=[(name, i) for i, name in names.items()],
    )


def _wanted(i: int | None, flag: bool | None, present: int) -> list[int]:
    """The special id for one end of a text, or none; a flag of None keeps what is there."""
    wanted = present == i if flag is None else flag
    return [i] if wanted and i is not None else []


def _check_ids(special: Mapping[str, int | None], vocab_size: int, where: Any) -> None:
    for kind, i in special.items():
        if i is not None and not 0 <= i < vocab_size:
            raise BadInputError(f"{where}: {kind}_token_id {i} is outside 0..{vocab_size - 1}")
