"""Which model a result is of: digests of its weights, configuration, tokenizer and chat template.

The digests come from `lm_jax.weights.identity`. A stored result holds them as one line of text,
which begins with the digest of the weights. Results of earlier versions hold that alone: they are
compared by the weights, and the console says so once.
"""

import dataclasses
import hashlib

from lm_jax.run import processes

# Names of the parts in messages.
_PARTS = {
    "weights": "weights",
    "config": "configuration",
    "tokenizer": "tokenizer",
    "chat_template": "chat template",
}
_SHOWN = 12
_said: set[str] = set()


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """A model as digests, in hexadecimal digits.

    A part is None where it is not known, and "" where the model has none.

    Attributes:
      weights: digest of the weight files.
      config: digest of the decoder's configuration as it was read, and of what else decides the
        forward pass (gates, a mixer); two spellings of one configuration are equal.
      tokenizer: digest of what the tokenizer does, its special ids included.
      chat_template: digest of the template of chats.
    """

    weights: str
    config: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None

    @classmethod
    def parse(cls, text: str) -> "ModelIdentity":
        """The identity that `text` or `chat_text` wrote, or the digest of weights alone."""
        weights, *parts = text.split(" ")
        known = dict(part.split("=", 1) for part in parts if "=" in part)
        return cls(weights, *(known.get(name) for name in list(_PARTS)[1:]))

    @property
    def chat_text(self) -> str:
        """All known parts in one line, for a result that a chat template decides too."""
        others = ((name, getattr(self, name)) for name in list(_PARTS)[1:])
        return " ".join([self.weights, *(f"{n}={part}" for n, part in others if part is not None)])

    @property
    def text(self) -> str:
        """The known parts but the chat template, in one line."""
        return dataclasses.replace(self, chat_template=None).chat_text

    @property
    def digest(self) -> str:
        """One digest of all known parts."""
        return hashlib.sha256(self.chat_text.encode()).hexdigest()


def difference(recorded: str, now: str, *, where: object) -> str:
    """How the model of a result differs from the one that is named now, in words; "" if not at all.

    Parts that one of them does not know are not compared. Where the recorded one is of an earlier
    version and the weights agree, a line on the console says that it identifies them alone.

    Args:
      recorded, now: the texts of `ModelIdentity`, or digests of weights alone.
      where: the file or folder that recorded it, for that line.
    """
    before, after = ModelIdentity.parse(recorded), ModelIdentity.parse(now)
    phrases = []
    for name, part in _PARTS.items():
        had, has = getattr(before, name), getattr(after, name)
        if None not in (had, has) and had != has:
            phrases.append(f"{part} {had[:_SHOWN] or 'none'}, not {has[:_SHOWN] or 'none'}")
    if not phrases and before.config is None and after.config is not None:
        _say_weights_alone(str(where))
    return " and ".join(phrases)


def is_same(recorded: str, now: str, *, where: object) -> bool:
    """Whether two models are the same, as `difference` compares them."""
    return not difference(recorded, now, where=where)


def _say_weights_alone(where: str) -> None:
    if where not in _said:
        _said.add(where)
        processes.note(
            f"{where} is of an earlier version, which identified a model by its weights alone: "
            "they are the same, and its configuration and tokenizer cannot be compared"
        )
