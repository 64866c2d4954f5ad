"""Makes a haystack of posts that no model has read: those of a saved feed from a date on.

    iaj polyattn haystack --feed=feed.xml --after=2026-01-01 --workdir=runs/haystack
    iaj polyattn haystack --feed=feed.xml --after=2026-01-01 --names=names.txt --workdir=runs/late

"When Does Polynomial Attention Concentrate?", Appendix AI. `--feed` is an RSS or Atom feed that you
saved; nothing is fetched. `--names` is a file of names, one a line, of people whom older texts
quote; the paper's list of about 50 is not printed. Sentences with a quotation, a name or a word of
the needle's question are left out. `--workdir` is a new folder, whose text an audit reads by
`--config.haystack=runs/haystack/haystack.txt`:

    haystack.txt    the sentences, one a line
    haystack.json   sha256 of the feed and of the names, the date, posts, sentences left out and why
"""

import dataclasses
import datetime
from pathlib import Path

from lm_jax.console import cli, terminal
from lm_jax.errors import UsageError
from lm_jax.run.files import file_digest, write_json, write_text
from lm_jax.run.settings import CommandOptions
from lm_jax.text.lines import read_lines
from polyattn_jax.suites import feed

TEXT, FACTS = "haystack.txt", "haystack.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The feed, and which of it is taken.

    Attributes:
      feed: saved RSS or Atom feed.
      after: first day that is taken, such as 2026-01-01.
      names: a file of names, one a line, whose sentences are left out.
    """

    feed: Path
    after: str
    names: str = ""


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options, folder = arguments.options, arguments.folder
    try:
        after = datetime.date.fromisoformat(options.after)
    except ValueError as error:
        raise UsageError(f"--after={options.after} is no date such as 2026-01-01") from error
    names = _names(options.names)
    made = feed.from_posts(feed.read_feed(options.feed), after=after, names=names)
    if (folder / FACTS).exists():
        raise UsageError(f"{folder} has a haystack; name another --workdir")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TEXT, "\n".join(made.kept) + "\n")
    facts = {
        "feed": file_digest(options.feed),
        "names": file_digest(Path(options.names)) if options.names else None,
        "after": after.isoformat(),
        "sentences": len(made.kept),
        "posts": [
            {"title": post.title, "date": post.date.isoformat(), "sentences": count}
            for post, count in made.posts
        ],
        "dropped": made.dropped,
        "haystack": file_digest(folder / TEXT),
    }
    write_json(folder / FACTS, facts)
    rows = [[post.date.isoformat(), post.title, f"{count:,}"] for post, count in made.posts]
    rows.append(["", "all", f"{len(made.kept):,}"])
    print(terminal.format_table(["date", "post", "sentences"], rows, left=(0, 1)))
    left_out = ", ".join(f"{reason} {count:,}" for reason, count in made.dropped.items())
    print(f"left out: {left_out or 'none'}")
    print(f"--config.haystack={folder / TEXT}")


def _names(path: str) -> list[str]:
    if not path:
        return []
    return [line.text.strip() for line in read_lines(path)]


if __name__ == "__main__":
    cli.app(main, options=Options)
