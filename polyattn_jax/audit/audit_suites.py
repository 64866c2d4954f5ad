"""The prompt suites of an audit, built from its settings."""

from collections.abc import Iterator
import contextlib
import dataclasses

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.lines import read_text
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.suites import (
    Suite,
    induction,
    load_jsonl,
    load_texts,
    mqar,
    named,
    niah,
    repeated_tokens,
)
from polyattn_jax.suites.texts import SHIPPED

# The suite and the stage of a user's own prompts.
PROMPTS = "prompts"
# The suite and the stage of a user's own texts.
TEXTS = "texts"


def haystack(name: str) -> str:
    """The text that distractors are drawn from.

    Raises:
      BadInputError: if it is neither "essays" nor "speeches" nor a readable text file.
    """
    if name in SHIPPED:
        return SHIPPED[name]()
    try:
        return read_text(name)
    except BadInputError as error:
        raise BadInputError(
            f"config.haystack = {name!r} is neither 'essays' nor 'speeches' nor a readable UTF-8 "
            f"file ({error})"
        ) from error


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Names the setting of a length, or of words, in what a suite says of it."""
    try:
        yield
    except (UsageError, BadInputError) as error:
        raise type(error)(f"{setting}: {error}") from error


def build_suites(
    audited: AuditedModel, *, lengths: str = "config.niah_lengths"
) -> dict[str, Suite]:
    """Every suite of the audit by name; each passes its prompt audit or raises.

    Args:
      audited: the model with the settings of the audit.
      lengths: setting that the lengths of needle prompts are of, for errors.
    """
    c, tokenizer = audited.config, audited.tokenizer
    longest = audited.longest
    common = {"seed": c.seed, "max_length": longest}
    text = haystack(c.haystack)
    suites = {}
    for length in c.niah_lengths:
        with naming(lengths):
            suites[f"niah_{length}"] = niah(
                tokenizer, haystack=text, length=length, n=c.niah_n, **common
            )
    control = {"length": c.niah_lengths[0], "n": c.control_n, "needle": False}
    with naming(lengths):
        suites["control"] = niah(tokenizer, haystack=text, **control, **common)
    if c.induction_n:
        suites["induction"] = induction(
            vocabulary=tokenizer, length=c.induction_length, n=c.induction_n, **common
        )
    if c.mqar_n:
        suites["mqar"] = mqar(vocabulary=tokenizer, length=c.mqar_length, n=c.mqar_n, **common)
    suites["repeated"] = repeated_tokens(
        vocabulary=tokenizer, common=c.repeated_vocabulary, n=c.repeated_n, **common
    )
    for name, size in c.asked_suites:
        suites[named.key(name, size)] = named.build(
            name,
            tokenizer,
            haystack=text,
            length=size,
            n=named.available(name, c.suite_n),
            common=c.repeated_vocabulary,
            **common,
        )
    if c.prompts:
        suites[PROMPTS] = load_jsonl(c.prompts, tokenizer, max_length=longest)
    if c.text:
        suites[TEXTS] = texts(audited)
    return suites


def texts(audited: AuditedModel) -> Suite:
    """The texts of the user, as far as settings and context let them be read."""
    c = audited.config
    length = min(c.text_length, audited.longest)
    return load_texts(c.text, audited.tokenizer, length=length, n=c.text_n)


def diagnosed(suites: dict[str, Suite]) -> dict[str, Suite]:
    """The suites whose rows are diagnosed."""
    return {k: s for k, s in suites.items() if k not in ("control", "repeated")}


def answered(suites: dict[str, Suite], config: AuditConfig) -> dict[str, Suite]:
    """The suites of `config.suites`, at every length."""
    return {name: suites[name] for name in (named.key(*one) for one in config.asked_suites)}


def first_prompts(suite: Suite, n: int) -> Suite:
    """The suite with its first `n` prompts only."""
    return dataclasses.replace(suite, prompts=suite.prompts[:n])
