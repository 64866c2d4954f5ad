"""Chat templates, rendered as transformers renders them.

A template is a jinja2 program by the author of the model. It has the functions and tags that
transformers 5 gives it: `raise_exception`, `strftime_now`, `tojson` without escapes of HTML,
`{% break %}`, `{% continue %}` and `{% generation %}`; `tools` and `documents` are none, and what
else it may ask for, such as `enable_thinking`, is undefined.
"""

from collections.abc import Mapping
import datetime
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm_jax.errors import BadInputError

# Of the private use area, so that no template trims or changes it.
_MESSAGE = "\ue000message\ue000"


def render(template: str, message: str, special: Mapping[str, str]) -> tuple[list[str], str]:
    """Renders a chat of one message of a user, which the model is to answer.

    Args:
      template: the source of the template.
      message: what the user says, which a template may strip of spaces at its ends.
      special: other names that the template reads, such as bos_token.

    Returns:
      The texts around the message, one more than it occurs, and the message as the template shows
      it: the rendered text is `shown.join(around)`.

    Raises:
      BadInputError: the template cannot be rendered, leaves the message out, or changes it.
    """
    # One time for both renderings.
    now = datetime.datetime.now()
    chats = ([{"role": "user", "content": content}] for content in (_MESSAGE, message))
    marked, whole = (_rendered(template, chat, special, now, answer=True) for chat in chats)
    around = marked.split(_MESSAGE)
    if len(around) == 1:
        raise BadInputError(
            "the model's chat template leaves out the message; use a model whose template has it"
        )
    length, rest = divmod(len(whole) - sum(map(len, around)), len(around) - 1)
    shown = whole[len(around[0]) : len(around[0]) + max(length, 0)]
    # Words that the template adds to this message must not pass for the user's.
    if rest or shown.join(around) != whole or shown.strip() != message.strip():
        raise BadInputError(
            "the model's chat template changes the message, or its other words with it; use a "
            "model whose template shows the message as it is"
        )
    return around, shown


def after_answer(template: str, special: Mapping[str, str]) -> str:
    """The text that a template puts after an answer that ends a chat; empty without answers.

    Args:
      template, special: the arguments of `render`.

    Raises:
      BadInputError: the template cannot be rendered.
    """
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MESSAGE}]
    text = _rendered(template, chat, special, datetime.datetime.now(), answer=False)
    return text.rpartition(_MESSAGE)[2] if _MESSAGE in text else ""


def _rendered(
    template: str,
    chat: list[dict[str, str]],
    special: Mapping[str, str],
    now: datetime.datetime,
    *,
    answer: bool,
) -> str:
    """The text of a chat, with the words that open an answer where one is asked for."""
    functions = {"raise_exception": _raise_exception, "strftime_now": now.strftime}
    given = {"tools": None, "documents": None, **special}
    try:
        program = _environment().from_string(template, globals=functions)
        return program.render(messages=chat, add_generation_prompt=answer, **given)
    except Exception as error:  # a program of someone else may raise anything
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise BadInputError(
            f"the model's chat template cannot be rendered ({reason}); mend the template, or use a "
            "model with another"
        ) from error


class _Generation(Extension):
    """`{% generation %}`, which marks an answer in training data and changes no text."""

    tags = {"generation"}  # noqa: RUF012  (the class attribute that jinja2 reads)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    """What a template runs in: nothing outside can be reached or changed from it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
