"""Answers of a chat endpoint that speaks the protocol of OpenAI: only at a URL that the user gives.

POST URL/chat/completions with model, temperature (0 unless another is given) and one message; the
answer is the content of the first choice. A key is sent where the environment variable IAJ_CHAT_KEY
holds one.
"""

from collections.abc import Callable
import http.client
import json
import os
from pathlib import Path
from typing import Any
import urllib.error
import urllib.parse
import urllib.request

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.answers import Answers
from lm_jax.run import stop

KEY = "IAJ_CHAT_KEY"
_SECONDS = 120.0


def split_place(place: str) -> tuple[str, str]:
    """The model and the URL of "MODEL@URL".

    Raises:
      UsageError: the text is malformed, or the URL is not http(s).
    """
    model, _, url = place.partition("@")
    parts = urllib.parse.urlsplit(url)
    if not model or parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            f"judge = 'chat:{place}' is not chat:MODEL@URL; give for example "
            "chat:my-model@http://localhost:8000/v1"
        )
    return model, url.rstrip("/")


def endpoint(
    place: str,
    *,
    answers: str | os.PathLike[str] | None = None,
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> tuple[str, Callable[[str], str]]:
    """The name of the model at a chat endpoint, and a function from a prompt to its answer.

    Args:
      place: "MODEL@URL".
      answers: a file of answers (`Answers`), to which new ones are added and in which those of an
        interrupted run are found; None for no file.
      temperature: the sampler's temperature; above 0 it is in the name.
      max_tokens: the most tokens of an answer, then in the name; None leaves it to the endpoint.

    Raises:
      UsageError: as `split_place`. The function raises BadInputError where there is no answer.
    """
    model, url = split_place(place)
    options: dict[str, float] = {"temperature": temperature} if temperature else {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    name = f"chat:{model} at {url}" + "".join(
        f", {option} {value:g}" for option, value in options.items()
    )
    stored = None if answers is None else Answers(Path(answers))

    def ask(text: str) -> str:
        known = stored.find(text, judge=name) if stored else None
        if known is not None:
            return known
        stop.check("while asking the judge")
        answer = _answer(model, url, text, **options)
        if stored:
            stored.add(text, answer, judge=name)
        return answer

    return name, ask


def _answer(model: str, url: str, text: str, **options: float) -> str:
    message = {"role": "user", "content": text}
    body = {"model": model, "temperature": 0, "messages": [message]} | options
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            content: Any = json.load(reply)["choices"][0]["message"]["content"]
    except (OSError, http.client.HTTPException) as error:
        raise BadInputError(
            f"{url} did not answer ({error}); start the server, then the same command again"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise BadInputError(
            f"{url} answered, but not with a chat completion ({error!r})"
        ) from error
    if not isinstance(content, str):
        raise BadInputError(f"{url} answered with {content!r}, which is no text; ask another model")
    return content
