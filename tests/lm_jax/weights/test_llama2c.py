"""Checkpoints of llama2.c against an oracle that computes as its program does, and damaged ones."""

import struct

import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError

D, F, L, N, K, T = 16, 24, 2, 4, 2, 12
H = D // N
PIECES = ["▁", "a", "b", "c", "▁a", "bc", "▁abc", "d", "▁d"]
V = 259 + len(PIECES)
IDS = [1, 263, 5, 264, 267, 80]


def arrays(rng, tied):
    """Arrays in the order of the file; large weights, so that scores differ."""

    def normal(*shape, scale=0.5):
        return rng.normal(0.0, scale, shape).astype("<f4")

    def norm(*shape):
        return (1.0 + normal(*shape, scale=0.1)).astype("<f4")

    layers = {
        "ln1": norm(L, D),
        "q": normal(L, D, D),
        "k": normal(L, K * H, D),
        "v": normal(L, K * H, D),
        "o": normal(L, D, D),
        "ln2": norm(L, D),
        "gate": normal(L, F, D),
        "down": normal(L, D, F),
        "up": normal(L, F, D),
    }
    weights = {"embed": normal(V, D), **layers, "final": norm(D), "turns": normal(T * H)}
    return weights if tied else weights | {"head": normal(V, D)}


def tokenizer_bytes(byte=lambda i: bytes([i]).decode("latin-1").encode()):
    """A vocabulary as the program has it: bytes as characters, spaces as they are printed."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *map(byte, range(256))]
    pieces += [piece.replace("▁", " ").encode() for piece in PIECES]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    parts = [
        struct.pack("<fi", s, len(piece)) + piece for s, piece in zip(scores, pieces, strict=True)
    ]
    return struct.pack("<i", max(map(len, pieces))) + b"".join(parts)


def write(path, weights, tokens=V, tail=b""):
    header = struct.pack("<7i", D, F, L, N, K, tokens, T)
    path.write_bytes(header + b"".join(w.tobytes() for w in weights.values()) + tail)
    return path


def oracle(weights, ids):
    """Logits `[T, V]` in float64, one token after another, with rotations of neighbouring pairs."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def normed(x, scale):
        return x / np.sqrt((x**2).mean() + 1e-5) * scale

    def turned(x_NH, t):
        angles = t * 10_000.0 ** (-np.arange(0, H, 2) / H)
        even, odd = x_NH[:, ::2], x_NH[:, 1::2]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x_NH.shape)

    keys, values, logits = [[] for _ in range(L)], [[] for _ in range(L)], []
    for t, i in enumerate(ids):
        x = w["embed"][i].copy()
        for layer in range(L):
            h = normed(x, w["ln1"][layer])
            q = turned((w["q"][layer] @ h).reshape(N, H), t)
            keys[layer].append(turned((w["k"][layer] @ h).reshape(K, H), t))
            values[layer].append((w["v"][layer] @ h).reshape(K, H))
            out = []
            for n in range(N):
                scores = np.array([k[n // (N // K)] @ q[n] for k in keys[layer]]) / np.sqrt(H)
                p = np.exp(scores - scores.max())
                p /= p.sum()
                out.append(sum(a * v[n // (N // K)] for a, v in zip(p, values[layer], strict=True)))
            x += w["o"][layer] @ np.concatenate(out)
            h = normed(x, w["ln2"][layer])
            gate = w["gate"][layer] @ h
            x += w["down"][layer] @ (gate / (1 + np.exp(-gate)) * (w["up"][layer] @ h))
        logits.append(w.get("head", w["embed"]) @ normed(x, w["final"]))
    return np.stack(logits)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_program(tied, tmp_path):
    weights = arrays(np.random.default_rng(0), tied)
    path = write(tmp_path / "model.bin", weights, V if tied else -V, tokenizer_bytes())
    model = lm_jax.load_pretrained(path)
    assert model.cfg.tie_embeddings == tied and model.cfg.max_length == T
    want = oracle(weights, IDS)
    got = np.asarray(model.run(IDS).logits[0])
    # Some 300 roundings of terms no larger than the largest logit.
    np.testing.assert_allclose(got, want, atol=300 * 2**-24 * abs(want).max())


def test_texts_are_split_by_score_and_bytes_stand_in_for_what_no_piece_has(tmp_path):
    weights = arrays(np.random.default_rng(1), tied=True)
    path = write(tmp_path / "model.data", weights, tail=tokenizer_bytes())
    tokenizer = lm_jax.load_pretrained(path).tokenizer
    by_piece = {piece: 259 + i for i, piece in enumerate(PIECES)}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    # The pair of the best score is joined first: "▁a" before "bc".
    assert tokenizer.encode("abc d") == [1, by_piece["▁abc"], by_piece["▁d"]]
    assert tokenizer.encode("é") == [1, by_piece["▁"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("d é", add_special_tokens=False)) == "d é"
    # A word's first token has its space, which a text does not begin with.
    assert tokenizer.decode([by_piece["▁d"]]) == "d" and tokenizer.piece(by_piece["▁d"]) == " d"
    run = lm_jax.load_pretrained(path).run("abc d a")
    assert run.tokens == ["<s>", " abc", " d", " a"]
    assert run.token_id(" d") == run.token_id("d") == by_piece["▁d"]
    # Later files name bytes in place of printing them.
    named = tokenizer_bytes(lambda i: f"<0x{i:02X}>".encode())
    write(tmp_path / "alone.bin", weights)
    (tmp_path / "tokenizer.bin").write_bytes(named)
    alone = lm_jax.load_pretrained(tmp_path / "alone.bin")
    assert alone.tokenizer.sha256 == tokenizer.sha256
    (tmp_path / "tokenizer.bin").unlink()
    assert lm_jax.load_pretrained(tmp_path / "alone.bin").tokenizer is None


def test_damaged_files_are_refused_with_a_remedy(tmp_path):
    weights = arrays(np.random.default_rng(2), tied=True)
    whole = write(tmp_path / "model.bin", weights, tail=tokenizer_bytes()).read_bytes()
    end = len(whole) - len(tokenizer_bytes())
    cases = {
        b"PK\x03\x04" + whole[4:]: "nor a checkpoint of llama2.c",
        whole[:20]: "nor a checkpoint of llama2.c",
        whole[: end - 1]: "fetch the file again",
        whole[:-40]: "pieces, and the model",
        whole[:-1]: f"{V - 1} pieces, and the model",
        whole[: end + 8] + struct.pack("<i", -12) + whole[end + 12 :]: "has 0 pieces",
    }
    for content, message in cases.items():
        (tmp_path / "model.bin").write_bytes(content)
        with pytest.raises(BadInputError, match=message):
            lm_jax.load_pretrained(tmp_path / "model.bin")
