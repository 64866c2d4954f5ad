"""A saved feed as a haystack: which posts, which sentences, and what is refused."""

import datetime
import json

import pytest

from lm_jax.console import cli
from lm_jax.errors import BadInputError
from lm_jax.run.files import file_digest
from polyattn_jax.audit.audit_suites import haystack
from polyattn_jax.studies import feed as command
from polyattn_jax.suites import feed
from polyattn_jax.suites.niah import niah

RSS = """<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:content="http://purl.org/rss/1.0/modules/content/"><channel>
<title>Of a harbour</title>
<item><title>New</title><pubDate>Fri, 02 Jan 2026 01:00:00 +0200</pubDate>
<description>A summary of the post.</description>
<content:encoded><![CDATA[<h2>The harbour</h2><p>The ships were late &amp; the tide was low.
Nobody had asked the pilot. He doesn't mind the <em>cold</em>.</p>
<blockquote><p>The old man quoted this one.</p></blockquote>
<p>"We sail at dawn" was all of it. A sailor saw Ada Lovelace here. The Magic word was there.
Nobody had asked the pilot. Hm. The end has none</p><script>var x = "The code is here.";</script>]]>
</content:encoded></item>
<item><title>Late in the west</title><pubDate>Wed, 31 Dec 2025 20:00:00 -0500</pubDate>
<description>The evening came over the hills.</description></item>
<item><title>Old</title><pubDate>Wed, 31 Dec 2025 20:00:00 +0000</pubDate>
<description>The year was at its end.</description></item>
</channel></rss>
"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><title>t</title>
<entry><title>One</title><published>2026-03-01T08:00:00Z</published>
<content type="html">&lt;p&gt;The rain fell on the roof.&lt;/p&gt;</content></entry></feed>
"""
AFTER = datetime.date(2026, 1, 1)


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "feed.xml"
    file.write_text(RSS, "utf-8")
    return file


def test_sentences_of_late_posts_are_kept_and_the_reason_for_others_is_counted(saved):
    posts = feed.read_feed(saved)
    made = feed.from_posts(posts, after=AFTER, names=["Ada Lovelace"])
    assert made.kept == (
        "The ships were late & the tide was low.",
        "Nobody had asked the pilot.",
        "He doesn't mind the cold.",
        "The evening came over the hills.",
    )
    # The second post is of 1 January in UTC, by which days are told apart; the first of it too.
    assert [(post.title, post.date, n) for post, n in made.posts] == [
        ("New", AFTER, 3),
        ("Late in the west", AFTER, 1),
    ]
    # "The harbour", "Hm." and "The end has none" have no form of a sentence of 4 to 14 words.
    assert made.dropped == {
        "length or form": 3,
        "quotation": 1,
        "name": 1,
        "cue word": 1,
        "repeated": 1,
    }


def test_a_name_is_whole_words(saved):
    posts = feed.read_feed(saved)
    assert len(feed.from_posts(posts, after=AFTER, names=["Ada Love", "ship"]).kept) == 5


def test_atom_is_read_too(tmp_path):
    file = tmp_path / "feed.xml"
    file.write_text(ATOM, "utf-8")
    (post,) = feed.read_feed(file)
    assert post == ("One", datetime.date(2026, 3, 1), "The rain fell on the roof.")


def test_a_picture_is_no_text_of_a_post(tmp_path):
    """Elements of other namespaces are no fields, and an empty body gives way to the next."""
    media = RSS.replace("<rss ", '<rss xmlns:media="http://search.yahoo.com/mrss/" ', 1)
    shown = '<media:title>Shown</media:title><media:content url="x.jpg"/>'
    media = media.replace("<item><title>Late", f"<item>{shown}<title>Late", 1)
    empty = "<content:encoded><![CDATA[<img/>]]></content:encoded>"
    media = media.replace("<title>Old</title>", f"<title>Old</title>{empty}")
    file = tmp_path / "feed.xml"
    file.write_text(media, "utf-8")
    _, late, old = feed.read_feed(file)
    assert (late.title, late.text) == ("Late in the west", "The evening came over the hills.")
    assert old.text == "The year was at its end."


def test_the_command_writes_a_haystack_that_prompts_are_made_of(saved, tokenizer, tmp_path, capsys):
    folder = tmp_path / "haystack"
    flags = [f"--feed={saved}", "--after=2026-01-01", f"--workdir={folder}"]
    assert cli.run(command.main, ["haystack", *flags], options=command.Options) == 0
    facts = json.loads((folder / command.FACTS).read_text("utf-8"))
    file = folder / command.TEXT
    assert facts["sentences"] == 5 and facts["after"] == "2026-01-01"
    assert facts["feed"] == file_digest(saved) and facts["haystack"] == file_digest(file)
    assert f"--config.haystack={file}" in capsys.readouterr().out
    suite = niah(tokenizer, haystack=haystack(str(file)), pad=2, n=3)
    lines = file.read_text("utf-8").splitlines()
    assert all(sum(line in prompt.text for line in lines) == 2 for prompt in suite.prompts)
    assert cli.run(command.main, ["haystack", *flags], options=command.Options) == 2
    assert "has a haystack; name another --workdir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no feed", "is no XML"),
        ("<rss><channel/></rss>", "has no posts"),
        (RSS.replace("Fri, 02 Jan 2026", "soon"), "post 'New' has date"),
        (ATOM.replace("published", "made"), "post 'One' has date ''"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><rss/>', "declares a document type"),
    ],
)
def test_what_is_no_feed_is_refused(text, message, tmp_path):
    file = tmp_path / "feed.xml"
    file.write_text(text, "utf-8")
    with pytest.raises(BadInputError, match=message):
        feed.read_feed(file)
