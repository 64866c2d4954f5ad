"""WikiText-2 (Merity et al. 2016): the articles of its raw files, in ordinary English.

A raw file has one paragraph or heading a line. A title ` = Homarus gammarus = ` with an empty line
before and after it begins an article; ` = = Description = = ` is the heading of a section. Words
and marks are separated by blanks, as the Moses tokenizer of machine translation separates them.
`detokenised` puts them together again:

    red @-@ tipped, 2 @,@ 000, 0 @.@ 7    red-tipped, 2,000, 0.7
    word , word . word ; ( 24 in )        word, word. word; (24 in)
    lobster 's, didn 't, O 'Brien         lobster's, didn't, O'Brien
    " lobster red ", ' marketing '        "lobster red", 'marketing'
    the ships ' crew, the ' 80s           the ships' crew, the '80s
    50 %, US $ 5, £ 3, # 1, F #, 17 ° C   50%, US$5, £3, #1, F#, 17°C
    1990 – 95, 19 : 30, km / h, a — b     1990–95, 19:30, km/h, a—b

Where the files no longer say what stood there, one reading is taken: a slash and a long dash stand
without blanks, a dash between words with them, as `&`, `+` and `=` do. Double quotes are opening
and closing ones by turns, unless a bracket, a mark or the end of the paragraph beside one says
which it is. A single quote after an `s` is an apostrophe, if the sentence has a partner for every
other one. Nothing else changes: no word is left out, and `<unk>` and `<formula>` stay.
"""

from collections.abc import Iterator, Sequence
import re

# Marks without a blank before them, after them, and on both sides.
_LEFT = frozenset(",.;:!?%)]”’′″")
_RIGHT = frozenset("([“‘$£€¥₹")
_BOTH = frozenset("/—⁄‑")
_ESCAPED = {f"@{mark}@": mark for mark in "-,."}
# What a closing quote is followed by.
_ENDS = frozenset(",.;:!?)]")
_ELIDED = frozenset(("s", "t", "re", "m", "ve", "ll", "d"))
_DOLLARS = frozenset(("US", "AU", "CA", "HK", "NZ"))
_DEGREES = frozenset("CFNSEW")
_TITLE = re.compile(r" = (?!=)(?P<title>.*[^=]) = ")
_HEADING = re.compile(r" (?P<marks>(?:= ){2,})(?P<title>[^=].*[^=]) (?P=marks)")
_DECADE = re.compile(r"\d\ds?")


def articles(raw: str) -> Iterator[tuple[str, str]]:
    """Title and text of every article of a raw file, in its order.

    Paragraphs and the headings of sections are separated by empty lines. Titles are no part of the
    texts. Lines before the first title belong to no article.

    Args:
      raw: the contents of `train.raw`, `valid.raw` or `test.raw`.
    """
    lines = ["", *raw.split("\n"), ""]
    title, paragraphs = None, []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        begins = not lines[i - 1].strip() and not lines[i + 1].strip()
        if begins and (match := _TITLE.fullmatch(line)):
            if title is not None:
                yield title, "\n\n".join(paragraphs)
            title, paragraphs = detokenised(match["title"]), []
        else:
            heading = _HEADING.fullmatch(line)
            paragraphs.append(detokenised(heading["title"] if heading else line))
    if title is not None:
        yield title, "\n\n".join(paragraphs)


def detokenised(paragraph: str) -> str:
    """A paragraph of a raw file as people write it; the head of this file says what is undone."""
    tokens = paragraph.split()
    quotes = _double_quotes(tokens) | _single_quotes(tokens)
    result, glued = [], True
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else ""
        after = tokens[i + 1] if i + 1 < len(tokens) else ""
        if i in quotes:
            left, right = not quotes[i], quotes[i]
        else:
            left, right = _joins(token, before, after)
        text = _ESCAPED.get(token, token)
        result.append(text if glued or left else f" {text}")
        glued = right
    return "".join(result)


def _joins(token: str, before: str, after: str) -> tuple[bool, bool]:
    """Whether a token stands without a blank before it, and after it."""
    if token.isalnum():
        return False, False
    both = (
        token in _BOTH
        or token in _ESCAPED
        or (token in "'’" and after in _ELIDED)
        or (token == "–" and before[-1:].isdigit() and after[:1].isdigit())
        or (token == ":" and re.fullmatch(r"\d\d?", before) and re.fullmatch(r"\d\d+", after))
    )
    if both:
        return True, True
    if token == "°":
        return before[-1:].isdigit(), after in _DEGREES
    if token == "$":
        return before in _DOLLARS, True
    if token == "#":
        return re.fullmatch(r"[A-G]", before) is not None, after[:1].isdigit()
    if token[0] == "'":
        return token[1:] in _ELIDED or before[-1:].isalnum(), False
    return token in _LEFT, token in _RIGHT


def _double_quotes(tokens: Sequence[str]) -> dict[int, bool]:
    """The places of `"`, and whether it is an opening one."""
    result, opened = {}, False
    for i, token in enumerate(tokens):
        if token == '"':
            if i == 0 or tokens[i - 1] in _RIGHT:
                opened = True
            elif i + 1 == len(tokens) or tokens[i + 1] in _ENDS:
                opened = False
            else:
                opened = not opened
            result[i] = opened
    return result


def _single_quotes(tokens: Sequence[str]) -> dict[int, bool]:
    """The places of `'`, and whether it joins the word after it, as opening ones do."""
    result: dict[int, bool] = {}
    places = []
    for i, token in enumerate(tokens):
        # "Yahoo ! ' s list" is no quote.
        if token != "'" or not _ELIDED.isdisjoint(tokens[i + 1 : i + 2]):
            continue
        if _DECADE.fullmatch("".join(tokens[i + 1 : i + 2])) and not _may_own(tokens, i):
            result[i] = True
        else:
            places.append(i)
    opened = False
    for i in places:
        later = [j for j in places if i < j < _end_of_sentence(tokens, i)]
        if _may_own(tokens, i):
            partner = sum(not _may_own(tokens, j) for j in later) % 2 == 1
        else:
            partner = bool(later)
        if opened or i + 1 == len(tokens) or tokens[i + 1] in _ENDS:
            opened = result[i] = False
        elif i and tokens[i - 1][-1].isalnum() and not partner:
            # An apostrophe: "the ships ' crew", "Guns N ' Roses".
            result[i] = False
        else:
            opened = result[i] = True
    return result


def _may_own(tokens: Sequence[str], i: int) -> bool:
    """Whether the word before a place is one that an apostrophe may follow."""
    return i > 0 and tokens[i - 1].endswith("s")


def _end_of_sentence(tokens: Sequence[str], start: int) -> int:
    """The place of the first full stop that no quote follows."""
    for i in range(start, len(tokens) - 1):
        if tokens[i] == "." and tokens[i + 1] not in ('"', "'"):
            return i
    return len(tokens)
