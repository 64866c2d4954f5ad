"""What a command's help says of its use, taken from the docstring of its module.

The first indented block of the docstring holds the examples, two or more command lines.
"""

import inspect

_HEAD = "Examples:"


def examples_first(docstring: str | None) -> str:
    """The docstring with its first indented block at the top, under a heading."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    at = next((i for i, text in enumerate(paragraphs) if text.startswith(" ")), None)
    if at is None:
        return "\n\n".join(paragraphs)
    examples = paragraphs.pop(at)
    return "\n\n".join([f"{_HEAD}\n{examples}", *paragraphs])
