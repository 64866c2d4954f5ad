"""b_auto of an audited model: the rule of `calibrate` on the score rows of texts.

The texts are the eight shipped ones, or those of `config.calibration_text`. Where they are shorter
than what is audited, they are joined and cut into pieces of that length.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run import processes, progress, stop
from lm_jax.run.files import write_json
from lm_jax.run.identity import difference
from lm_jax.run.results import load_result
from lm_jax.text.tokenizer import Tokenizer
from polyattn_jax.audit import measure
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes import calibrate
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites import read_texts

# The most texts or pieces; as many are shipped.
MOST_TEXTS = 8
CALIBRATION_TEXTS_SHA256 = "e5df7fb61fb5c75f55614091449dd88d21206c60faf03112dadbaa1eec4f3028"


def calibrated(audited: AuditedModel, folder: Path) -> calibrate.Calibration:
    """b_auto of the model, read from `calibration.json` if an earlier start wrote it.

    Raises:
      BadInputError: the earlier start had another model or other settings.
    """
    path = folder / "calibration.json"
    if processes.on_first(path.exists):
        stored = load_result(path, calibrate.Calibration)
        check_source(path, stored, audited)
        return stored
    c = audited.config
    texts_UT, lengths, documents = calibration_tokens(audited)
    ways = 1 if audited.mesh is None else audited.mesh.shape["data"] * audited.mesh.shape["fsdp"]
    texts, count = len(texts_UT), jax.process_count()
    # Devices of the batch axes get a text each; where texts run out, a repeat that is not counted.
    texts_UT = texts_UT[np.arange(-(-texts // (ways * count)) * ways * count) % texts]
    own_UT = np.split(texts_UT, count)[jax.process_index()]
    groups = [audited.put(own_UT[i : i + ways])[0] for i in range(0, len(own_UT), ways)]
    quiet = not processes.is_first()
    with progress.track("calibrate b_auto", 4 * len(groups), unit="texts", quiet=quiet) as advance:

        def of_all(by_text: Sequence[np.ndarray]) -> np.ndarray:
            """One of the fields of a `MassBelow`, texts of all processes along axis 1."""
            own = np.concatenate(by_text, axis=1)
            if count > 1:
                own = np.moveaxis(processes.gather(np.moveaxis(own, 1, 0)), 0, 1)
            return own[:, :texts]

        def mass(thresholds: np.ndarray) -> calibrate.MassBelow:
            results = []
            for tokens_BT in groups:
                if processes.share_stop():
                    stop.check("during calibration")
                measured = measure.mass(
                    audited.model.params,
                    tokens_BT,
                    jnp.asarray(thresholds),
                    lengths=lengths,
                    cfg=audited.model.cfg,
                )
                results.append(jax.tree.map(np.asarray, measured))
                advance()
            return calibrate.MassBelow(
                of_all([one.total_M for one in results]), of_all([one.rows for one in results])
            )

        result = calibrate.calibrate_texts(
            mass,
            lengths,
            c.calibrated_at,
            budget=c.budget,
            resamples=c.resamples,
            seed=c.seed,
        )
    result = dataclasses.replace(
        result,
        model_sha256=audited.model.identity.text,
        dtype=c.dtype,
        text=text_sha256(c),
        documents=documents,
    )
    processes.on_first(lambda: write_json(path, result))
    return result


def check_source(path: Path, stored: Any, audited: AuditedModel) -> None:
    """Compares the model and the settings of a stored calibration with those of this run.

    Raises:
      BadInputError: one of them differs.
    """
    c = audited.config
    wanted = {
        "dtype": c.dtype,
        "budget": c.budget,
        "length": c.calibrated_at,
        "text": text_sha256(c),
    }
    # Not every calibration has a budget.
    held_fields = {field.name for field in dataclasses.fields(stored)}
    wanted = {field: value for field, value in wanted.items() if field in held_fields}
    remedy = "remove the file to calibrate again, or choose another --workdir"
    if change := difference(stored.model_sha256, audited.model.identity.text, where=path):
        raise BadInputError(f"{path} is of another model: {change}; {remedy}")
    for field, value in wanted.items():
        if (held := getattr(stored, field)) != value:
            raise BadInputError(f"{path}: {field} is {held!r}, and {value!r} in this run; {remedy}")


def text_sha256(config: AuditConfig) -> str:
    """Digest of the text of `config.calibration_text`; empty for the shipped ones."""
    return read_texts(config.calibration_text)[1] if config.calibration_text else ""


def calibration_tokens(audited: AuditedModel) -> tuple[np.ndarray, tuple[int, ...], int]:
    """The texts as tokens `[U, T]`, the lengths at which b_auto is read, and the texts they are of.

    The last is 0 where each is a text of its own.

    The lengths are that of the calibration, an eighth, a quarter and a half of it, and those of the
    other suites that fit texts and context.

    Raises:
      BadInputError: for a calibration that is longer than the model's context, or too little text
        for two pieces of its length.
    """
    c, longest = audited.config, audited.longest
    if c.calibrated_at > longest:
        raise BadInputError(
            f"config.calibration_length = {c.calibrated_at} is longer than the model's "
            f"context of {longest} tokens; lower it"
        )
    texts = read_texts(c.calibration_text)[0] if c.calibration_text else calibration_texts()
    ids = pieces(list(texts.values()), audited.tokenizer, c.calibrated_at)
    whole = audited.tokenizer.encode(next(iter(texts.values())))
    documents = 0 if ids[0] == list(whole) else len(texts)
    shortest = min(map(len, ids))
    audited_lengths = [*c.niah_lengths]
    audited_lengths += [c.induction_length] if c.induction_n else []
    audited_lengths += [c.mqar_length] if c.mqar_n else []
    wanted = {c.calibrated_at // part for part in (1, 2, 4, 8)} | set(audited_lengths)
    lengths = tuple(sorted(n for n in wanted if 1 < n <= min(shortest, longest)))
    return np.array([one[: lengths[-1]] for one in ids], np.int32), lengths, documents


def pieces(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Texts of so many tokens or more, each with the tokenizer's start token; 8 at most.

    They are the first texts if these are long enough, else the pieces of all of them in a row.

    Raises:
      BadInputError: there are fewer than two.
    """
    own = [list(tokenizer.encode(text)) for text in texts[:MOST_TEXTS]]
    if len(own) > 1 and min(map(len, own)) >= length:
        return own
    start = list(prompts_lib.start_tokens(tokenizer))
    size = length - len(start)
    row = [i for text in texts for i in prompts_lib.encode(tokenizer, text, start=False)]
    cut = [row[at : at + size] for at in range(0, MOST_TEXTS * size, size)]
    whole = [[*start, *part] for part in cut if len(part) == size]
    if len(whole) < 2:
        raise BadInputError(
            f"config.calibration_length = {length} takes two pieces of as many tokens, {2 * size} "
            f"in all, but the calibration text has {len(row)} in this tokenizer; give a longer "
            "one, calibration_text=FILE, or a lower calibration_length"
        )
    return whole


def calibration_texts() -> dict[str, str]:
    """The shipped texts by name, each of about 2,300 words (see `data/README.md`).

    Raises:
      CorruptError: if the files are not those that were shipped.
    """
    folder = resources.files("polyattn_jax").joinpath("data/calibration")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    raw = {file.name: file.read_bytes() for file in files}
    result = hashlib.sha256(b"".join(n.encode() + b"\0" + raw[n] for n in raw)).hexdigest()
    if result != CALIBRATION_TEXTS_SHA256:
        raise CorruptError(
            f"polyattn_jax/data/calibration: sha256 {result[:12]} is not the shipped "
            f"{CALIBRATION_TEXTS_SHA256[:12]}; reinstall the package"
        )
    return {name.removesuffix(".txt"): text.decode("ascii") for name, text in raw.items()}
