"""WikiText-2: articles of a raw file, and sentences put together again as people write them."""

import gzip
import hashlib

import pytest

from lm_jax import assets
from lm_jax.text import corpora, wikitext

# As in the files: blanks around every line, and a title between empty lines.
RAW = """ \n\
 = Lighthouse ( band ) = \n\
 \n\
 The band 's second album sold 2 @,@ 000 copies . It was " too long " , he said . \n\
 Where v \n\
 = Velocity , t = \n\
 Time , the result is known . \n\
 \n\
 = = Early years = = \n\
 \n\
 \n\
 = = = School = = = \n\
 \n\
 They didn 't play . \n\
 \n\
 \n\
 = O 'Brien = \n\
 \n\
 A well @-@ known name . \n\
"""
ARTICLES = [
    (
        "Lighthouse (band)",
        'The band\'s second album sold 2,000 copies. It was "too long", he said.\n\nWhere v\n\n'
        "= Velocity, t =\n\nTime, the result is known.\n\nEarly years\n\nSchool\n\n"
        "They didn't play.",
    ),
    ("O'Brien", "A well-known name."),
]


def test_a_title_between_empty_lines_begins_an_article():
    assert list(wikitext.articles(RAW)) == ARTICLES
    # A file that begins and ends with text has the same ones.
    assert list(wikitext.articles(RAW.removeprefix(" \n").removesuffix("\n"))) == ARTICLES
    assert list(wikitext.articles("")) == []


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("It is 3 @.@ 5 – 4 m ( 11 ft ) long .", "It is 3.5–4 m (11 ft) long."),
        ("1 @.@  e4 c5", "1.e4 c5"),
        ("He left – so they say – at 19 : 30 .", "He left – so they say – at 19:30."),
        ("They wait : 12 of 50 % .", "They wait: 12 of 50%."),
        ("US $ 5 , £ 3 or $ 2 for # 1 .", "US$5, £3 or $2 for #1."),
        ("In F # minor at 1 : 100 .", "In F# minor at 1:100."),
        ("Act 1 : 20 men , at 9 : 5 .", "Act 1:20 men, at 9: 5."),
        ("At 17 ° C and 9 ° 25 ′ S .", "At 17°C and 9° 25′ S."),
        ("20 km / h — too fast", "20 km/h—too fast"),
        ("R & B = 2 + 3 [ sic ] ; <unk> ...", "R & B = 2 + 3 [sic]; <unk> ..."),
        # Apostrophes within words, after a mark, and in the other spelling.
        ("We 're at O 'Brien 's in the 1990 's", "We're at O'Brien's in the 1990's"),
        ("Yahoo ! ' s list isn ’ t long", "Yahoo!'s list isn’t long"),
        # Double quotes: by turns, and where their neighbours say which.
        ('" One " and " two . "', '"One" and "two."'),
        # The mark of inches is taken for a quote, until a bracket says otherwise.
        ('A 12 " gun ( " one " ) , " two " .', 'A 12 "gun ("one"), "two".'),
        ('He said : " Go on', 'He said: "Go on'),
        # Single quotes, and apostrophes of the plural.
        ("A ' fake ' one , ' never ' .", "A 'fake' one, 'never'."),
        ("This ' breakthrough ' in Paris", "This 'breakthrough' in Paris"),
        ("The ships ' crew stayed .", "The ships' crew stayed."),
        ("The ships ' crew called it ' big ' .", "The ships' crew called it 'big'."),
        ("Guns N ' Roses of the ' 80s", "Guns N' Roses of the '80s"),
        ("\" ' Crazy ' roars , ' he said . ' \"", "\"'Crazy' roars, 'he said.'\""),
    ],
)
def test_marks_are_put_together_as_people_write_them(raw, text):
    assert wikitext.detokenised(f" {raw} ") == text


def test_the_corpus_is_the_articles_of_three_files(tmp_path, monkeypatch):
    for name, title in (("train", "One"), ("valid", "Two"), ("test", "Three")):
        raw = f" \n = {title} = \n \n Text of {title} . \n"
        (tmp_path / f"{name}.raw.gz").write_bytes(gzip.compress(raw.encode()))
    monkeypatch.setattr(assets, "path", lambda _, member: tmp_path / member)
    assert list(corpora.documents("wikitext2")) == [
        ("train-000", "Text of One."),
        ("valid-000", "Text of Two."),
        ("test-000", "Text of Three."),
    ]
    (archive,) = assets.entry("wikitext2").archives
    assert corpora.hashes("wikitext2") == {archive.filename: archive.sha256}
    assert len(archive.sha256) == hashlib.sha256().digest_size * 2
