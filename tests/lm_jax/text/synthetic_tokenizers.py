"""Small synthetic tokenizers, as GGUF fields and as files."""

from collections.abc import Sequence
import json
from pathlib import Path
import string

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from lm_jax.text.tokenizer import Tokenizer

BOS, EOS = "<|endoftext|>", "<|im_end|>"
TEXT = (
    "In 1732 the year 1733 was 1 year off; it's 10,000 words.  They'll say 2 or 12 or 312.\n\n"
    "\tfor i in range(100): print(i)  # naïve café, 1732 again and the year again\n"
) * 3
ODD = [
    "", " ", "In 1732,  2 words", "  \n\n \t x", "it'S WE'LL", "e\u0301 Å", "שלום 12", "🙂👩‍👧",
    "nul\0here", f"a {BOS}b", "\ufeffx\u00a0y",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_gguf(path: Path, fields: dict, endianess=gguf.GGUFEndian.LITTLE) -> Path:
    """A GGUF file with one small tensor and these `tokenizer.ggml.*`, None left out."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for key, value in fields.items():
        key = key if "." in key else f"tokenizer.ggml.{key}"
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.add_tensor("w", np.arange(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def train_backend(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 tokens trained with the splitting rule of that name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    first = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(LLAMA3), behavior="isolated")],
    }[pre]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_level_fields(backend: tokenizers.Tokenizer, pre: str) -> dict:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in (BOS, EOS) else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }


SPM_TEXT = "the theme of the thesis  then▁ is this: the other 12 and 21 there\n\nthen"


PREFIXING = ("  ", "<user>")


def sentencepiece_fields(user: Sequence[str] = ("\n\n", "\n", "  ", "<user>")) -> dict:
    """Pieces in the order of an invented training; the scores say the order."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = ["th", "▁th", "the", "▁the", "he", "▁t", "is", "▁this", "▁i", "▁is", "es", "en"]
    pieces += ["▁then", "them", "ther", "▁other", "12", "▁1", "<b", "os>", "<bo", "s>"]
    characters = [*string.ascii_lowercase, "▁", "1", "2", ":", "<", ">"]
    groups = (control, 3), (user, 4), ([f"<0x{b:02X}>" for b in range(256)], 6)
    groups += ((pieces + characters, 1),)
    tokens = [token for group, _ in groups for token in group]
    kinds = [kind for group, kind in groups for _ in group]
    scores = [-1000.0 if kind != 1 else -float(i) for i, kind in enumerate(kinds)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }


def gemma4_fields() -> dict:
    """The same pieces with merges, in an order that the scores do not say, and a double newline."""
    fields = sentencepiece_fields(("<user>",))
    tokens, kinds = fields["tokens"], fields["token_type"]
    more = ["\n", "\n\n", "\nt"]
    merges = ["t h", "▁ th", "h e", "th e", "▁th e", "▁t h", "▁ t", "i s", "\n \n", "\n t", "1 2"]
    return fields | {
        "model": "gemma4",
        "tokens": [*tokens, *more],
        "token_type": [*kinds, 1, 1, 1],
        "scores": [*fields["scores"], -900.0, -901.0, -902.0],
        "merges": merges,
        "pre": None,
        "add_bos_token": True,
    }


def llama2_backend(special: Sequence[str] = (), end: str = "</s>") -> tokenizers.Tokenizer:
    """SentencePiece BPE as of Llama 2: a space before each text, byte fallback, BOS in front."""
    pieces = ["<unk>", "<s>", end, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += string.printable[:94]
    merges = []
    for word in ("▁the", "▁text", "▁one"):
        for length in range(1, len(word)):
            merges.append((word[:length], word[length]))
            pieces.append(word[: length + 1])
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = list(dict.fromkeys(merges))
    model = models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    prepend = normalizers.Prepend("▁")
    backend.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    controls = ["<unk>", "<s>", *(["</s>"] if end == "</s>" else []), *special]
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in controls])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    fields = byte_level_fields(train_backend("smollm"), "smollm") | {
        "tokenizer.chat_template": "{{ x }}"
    }
    return Tokenizer.from_gguf(write_gguf(path, fields))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return Tokenizer.from_gguf(write_gguf(path, sentencepiece_fields()))


@pytest.fixture(scope="module")
def prefixing(tmp_path_factory) -> Tokenizer:
    """With a space put before text, as a file that is silent means it, and newlines as bytes."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    fields = sentencepiece_fields(PREFIXING) | {"add_space_prefix": None}
    return Tokenizer.from_gguf(write_gguf(path, fields))
