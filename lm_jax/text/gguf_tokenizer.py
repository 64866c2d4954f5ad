"""The pipeline of a GGUF file's tokenizer, built by the file's own fields.

* `tokenizer.ggml.model = gpt2`, byte-level BPE (Radford et al. 2019): vocabulary and merges are
  in the file; how text is split before merging goes by `tokenizer.ggml.pre` (`_RULES`). SmolLM2
  splits off every digit by itself, which the GGUF reader of transformers 5.23 leaves out. Files
  from before May 2024 have no such field, so their rule is not known.
* `tokenizer.ggml.model = llama`, SentencePiece BPE (Kudo and Richardson 2018) with byte fallback:
  the file has no merges. SentencePiece joins the neighbouring pair whose piece scores best, so
  the merges are all splits of each piece into two pieces, best piece first. Where the file does
  not say `add_space_prefix = false`, text begins with a space that it has not, as llama.cpp has
  it: at the start and after every special token; decoding takes the one at the start away.
* `tokenizer.ggml.model = gemma4`: pieces as of SentencePiece with byte fallback, and merges in the
  file. No merge is across the ends of a run of line breaks.
"""

from collections.abc import Mapping, Sequence
import re
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from lm_jax.errors import BadInputError, nearest
from lm_jax.text.gguf_reader import contents

# Kinds of tokens in `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# As of GPT-4's cl100k_base, whose numbers are cut from the left into groups of at most so many
# digits.
_WORDS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As of GPT-4o's o200k_base, where a capital begins a word, {end} is after each kind of word.
_CASES_SPLIT = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{end}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{end}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")


class _Rule(NamedTuple):
    """What comes before merges in byte-level BPE.

    Attributes:
      first: splits before that of bytes.
      use_regex: whether that has GPT-2's own split.
      composed: whether text is composed (NFC) first, which llama.cpp leaves out.
      ignore_merges: whether a whole word that is a token is taken, even if no merge reaches it.
      begins: whether text begins with BOS where the file is silent.
    """

    first: tuple[pre_tokenizers.PreTokenizer, ...] = ()
    use_regex: bool = False
    composed: bool = False
    ignore_merges: bool = False
    begins: bool = False


_GPT2 = _Rule(use_regex=True)
_LLAMA3 = _Rule((_split(_WORDS_SPLIT.format(digits="{1,3}")),), ignore_merges=True, begins=True)
_GPT4 = _Rule((_split(_WORDS_SPLIT.format(digits="{1,3}")),))
_SINGLE_DIGITS = (_split(_WORDS_SPLIT.format(digits="")),)
# By `tokenizer.ggml.pre`: those of the families that `lm_jax.weights` has, as the tokenizer.json
# of the models of that name have them. Of a name that is not listed, and of "default", which stands
# in files whose converter did not know the tokenizer, the rule is unknown: a guess would give wrong
# ids.
_RULES: Mapping[str, _Rule] = {
    "gpt-2": _GPT2,
    "smollm": _Rule((pre_tokenizers.Digits(individual_digits=True),), use_regex=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    # OLMo 2 and Phi-4 as well.
    "dbrx": _GPT4,
    "qwen2": _Rule(_SINGLE_DIGITS, composed=True),
    "deepseek-r1-qwen": _Rule(_SINGLE_DIGITS),
    "stablelm2": _Rule(_SINGLE_DIGITS, composed=True),
    # GPT-NeoX and Pythia as well.
    "olmo": _Rule(use_regex=True, composed=True),
    "tekken": _Rule(
        (_split(_CASES_SPLIT.format(end="", digits="")),), ignore_merges=True, begins=True
    ),
    # Phi-4-mini.
    "gpt-4o": _Rule(
        (_split(_CASES_SPLIT.format(end="(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits="{1,3}")),)
    ),
}


class Fields:
    """`tokenizer.ggml.*` of one open file; a missing field without a default is refused."""

    def __init__(self, reader: Any):
        self._fields = reader.fields

    def __call__(self, key: str, *default: Any) -> Any:
        field = self._fields.get(f"tokenizer.ggml.{key}")
        if field is None and not default:
            raise BadInputError(
                f"GGUF: no field tokenizer.ggml.{key}; use the Hugging Face folder of the model"
            )
        return default[0] if field is None else contents(field)


def _byte_level_bpe(fields: Fields) -> tokenizers.Tokenizer:
    rule = _RULES[fields("pre")]
    tokens, kinds = fields("tokens"), fields("token_type")
    merges = [tuple(merge.split(" ")) for merge in fields("merges")]
    backend = _bpe(tokens, merges, ignore_merges=rule.ignore_merges)
    if rule.composed:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.use_regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*rule.first, byte_level])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, kinds)
    return backend


def _sentencepiece_bpe(fields: Fields) -> tokenizers.Tokenizer:
    kinds, scores = fields("token_type"), fields("scores")
    # Runs of spaces are stored as spaces, though text is merged after they became U+2581.
    tokens = [
        token.replace(" ", "▁") if kind == _USER_DEFINED else token
        for token, kind in zip(fields("tokens"), kinds, strict=True)
    ]
    unknown = tokens[fields("unknown_token_id")]
    prefix = fields("add_space_prefix", True)
    return _sentencepiece(tokens, kinds, scores, unknown=unknown, prefix=prefix)


def _sentencepiece(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    *,
    unknown: str,
    prefix: bool,
) -> tokenizers.Tokenizer:
    _check_bytes(tokens)
    merges = _merges_from_scores(tokens, kinds, scores)
    backend = _bpe(tokens, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    escape: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    unescape: list[decoders.Decoder] = [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    ]
    if prefix:
        # Normalisers see the text between special tokens, and an empty one is left alone.
        escape = normalizers.Sequence([normalizers.Prepend("▁"), escape])
        unescape.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = escape
    backend.decoder = decoders.Sequence(unescape)
    # Runs of spaces come about by merging; as added tokens they would match a literal U+2581.
    merged = [_NORMAL if "▁" in token else kind for token, kind in zip(tokens, kinds, strict=True)]
    _add_tokens(backend, tokens, merged)
    return backend


def sentencepiece(pieces: Sequence[str], scores: Sequence[float]) -> tokenizers.Tokenizer:
    """The pipeline of a vocabulary whose first pieces are unknown, beginning and end."""
    byte = re.compile(r"<0x[0-9A-F]{2}>")
    kinds = [_BYTE if byte.fullmatch(piece) else _NORMAL for piece in pieces]
    kinds[:3] = [_UNKNOWN, _CONTROL, _CONTROL]
    return _sentencepiece(pieces, kinds, scores, unknown=pieces[0], prefix=True)


def _gemma4_bpe(fields: Fields) -> tokenizers.Tokenizer:
    tokens, kinds = fields("tokens"), fields("token_type")
    _check_bytes(tokens)
    unknown = tokens[fields("unknown_token_id")]
    merges = [tuple(merge.split(" ")) for merge in fields("merges")]
    backend = _bpe(tokens, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_tokens(backend, tokens, kinds)
    return backend


def _check_bytes(tokens: Sequence[str]) -> None:
    if missing := {f"<0x{byte:02X}>" for byte in range(256)} - set(tokens):
        raise BadInputError(
            f"GGUF: tokenizer.ggml.tokens lacks {len(missing)} of the byte tokens, such as "
            f"{min(missing)}; a vocabulary without byte fallback is not supported"
        )


def _merges_from_scores(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best piece first, user-defined pieces before all.

    Control and byte pieces take no part, so that no merge can build one out of plain text.
    """
    ranked = [i for i, kind in enumerate(kinds) if kind in (_NORMAL, _USER_DEFINED)]
    pieces = {tokens[i] for i in ranked}
    ranked.sort(key=lambda i: (kinds[i] != _USER_DEFINED, -scores[i], i))
    merges = []
    for piece in (tokens[i] for i in ranked):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges.extend(pair for pair in halves if pair[0] in pieces and pair[1] in pieces)
    return merges


def _bpe(tokens: Sequence[str], merges: list, **options: Any) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise BadInputError(
            f"GGUF: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens twice; "
            "convert the model again"
        )
    # The package panics, past every `except Exception`, on a merge that makes no token.
    unfit = [pair for pair in merges if len(pair) != 2 or "".join(pair) not in vocab]
    if unfit:
        raise BadInputError(
            f"GGUF: tokenizer.ggml.merges has {len(unfit)} entries that make no token, such as "
            f"{' '.join(unfit[0])!r}; convert the model again"
        )
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises bare Exception for a merge out of vocabulary
        raise BadInputError(
            f"GGUF: tokenizer.ggml.merges do not fit the tokens ({error}); convert the model again"
        ) from error


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Makes control tokens special, and user-defined ones whole."""
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        add(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind
            ]
        )


_BUILDERS = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "gemma4": _gemma4_bpe,
}


def build(fields: Fields) -> tokenizers.Tokenizer:
    """The pipeline of a file: splitting, merges, special tokens, decoding.

    Raises:
      BadInputError: for a missing field, or a kind of tokenizer or splitting rule that is not among
        the supported ones.
    """
    fields("model")
    if reason := unknown(fields):
        raise BadInputError(f"GGUF: {reason}; use the Hugging Face folder of the model")
    return _BUILDERS[fields("model")](fields)


def unknown(fields: Fields) -> str | None:
    """Why a file's tokenizer has an unknown kind or splitting rule; None if both are known."""
    kind, pre = fields("model", None), fields("pre", None)
    if kind is None:
        return "it has no field tokenizer.ggml.model"
    if kind not in _BUILDERS:
        return f"tokenizer.ggml.model = {kind!r} is not supported{nearest(str(kind), _BUILDERS)}"
    if kind != "gpt2" or pre in _RULES:
        return None
    if pre is None:
        return "it has no field tokenizer.ggml.pre, so how its text is split is not known"
    return f"tokenizer.ggml.pre = {pre!r} is not supported{nearest(str(pre), _RULES)}"


def begins_with_bos(fields: Fields) -> bool:
    """Whether text begins with BOS where the file does not say.

    It does with SentencePiece, with Gemma 4, and with byte-level BPE as of Llama 3.
    """
    if fields("model") != "gpt2":
        return True
    return _RULES[fields("pre")].begins
