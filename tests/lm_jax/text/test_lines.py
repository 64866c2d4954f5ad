"""Lines end where Python's text mode ends them, and what is no UTF-8 or no JSON is refused."""

from collections import Counter
import gzip
import io
import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from lm_jax.errors import BadInputError
from lm_jax.evaluate.answers import Answers, digest
from lm_jax.evaluate.multiple_choice.truthfulqa import truthfulqa
from lm_jax.evaluate.pairwise import parse
from lm_jax.text import corpora, lines

MARK = b"\xef\xbb\xbf"
DEEP = "[" * 100_000


@given(st.text(alphabet=list("ab \r\n\v\f\x1c\x1e\x85\u2028\u2029")), st.booleans())
def test_lines_are_those_of_the_text_mode_of_python(text, marked):
    data = (MARK if marked else b"") + text.encode()
    expected = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()
    assert lines.decode(data, "a") == expected
    numbered = [(i, each) for i, each in enumerate(expected.split("\n"), 1) if each.strip()]
    assert [(i, line) for i, _, line in lines.lines(data, "a")] == numbered


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_of_json_may_hold_other_separators(mark, end, tmp_path):
    rows = [{"text": f"a{mark}b"}, {"text": f"{mark}"}]
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    data = MARK + (texts[0] + end + end + texts[1]).encode()
    assert [each.value for each in lines.json_lines(data, "a")] == rows
    assert [each.where for each in lines.json_lines(data, "a")] == ["a:1", "a:3"]
    for name, content in (("a.jsonl", data), ("a.jsonl.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        expected = [(f"{name}:1", f"a{mark}b"), (f"{name}:3", mark)]
        assert list(corpora.documents(tmp_path / name)) == expected


def test_what_is_no_line_of_json_is_refused_with_its_place():
    for data, message in [
        (b"{}\n\n{", r"a:3: not JSON \(Expecting"),
        (f"{{}}\n{DEEP}".encode(), r"a:2: not JSON \(its brackets are nested too deeply\); write"),
        (b"{}\r\n\xff", "a:2: not UTF-8 at byte 0; save it as UTF-8"),
        ('{"a": "é"}'.encode("utf-16"), "a: UTF-16, not UTF-8; save it"),
        (b"".join(f"{c}\0".encode() for c in '{"a": 1}'), "a: UTF-16, not UTF-8; save it"),
    ]:
        with pytest.raises(BadInputError, match=message):
            list(lines.json_lines(data, "a"))


def test_text_of_windows_is_read_as_any_other(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(MARK + b"First\r\nsecond\r\n\r\nthird\rline\r\n")
    text = "First\nsecond\n\nthird\nline\n"
    assert lines.read_text(file) == text
    assert list(corpora.documents(file)) == [("a.txt", text)]
    parts = [part for _, part in corpora.documents(file, unit="paragraph", words=2)]
    assert parts == ["First\nsecond", "third\nline"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_a_text_in_another_encoding_is_refused_or_counted(encoding, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("Café\n".encode(encoding))
    with pytest.raises(BadInputError, match=r"a\.txt: .*UTF-8.*; save it as UTF-8"):
        list(corpora.documents(file))
    (tmp_path / "b.txt").write_text("good")
    skips = Counter()
    assert list(corpora.usable(corpora.documents(tmp_path), skips)) == [("b.txt", "good")]
    assert skips == {"unreadable": 1}


def test_blank_lines_of_a_corpus_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n \r\n{"text": "two"}\nno\n')
    skips = Counter()
    found = list(corpora.usable(corpora.documents(tmp_path / "a.jsonl"), skips))
    assert found == [("a.jsonl:1", "one"), ("a.jsonl:4", "two")]
    assert skips == {"unreadable": 1}


def test_answers_of_a_judge_and_questions_are_read_alike(tmp_path):
    entry = {"prompt_sha256": digest("q"), "answer": "a\u2028b"}
    line = json.dumps(entry, ensure_ascii=False).encode()
    file = tmp_path / "answers.jsonl"
    file.write_bytes(MARK + line + b"\r\n")
    assert Answers(file).find("q") == "a\u2028b"
    file.write_text(f"{DEEP}\n")
    with pytest.raises(BadInputError, match=r"line 1: not JSON \(its brackets"):
        Answers(file)
    assert parse('{"verdict": ' + DEEP) is None

    question = {"question": "Q\x85?", "mc1_targets": {"choices": ["\u2028", "n"], "labels": [1, 0]}}
    file = tmp_path / "mc.jsonl"
    file.write_bytes(MARK + json.dumps(question, ensure_ascii=False).encode() + b"\r\n\r\n")
    (found,) = truthfulqa(file)
    assert "Q\x85?" in found.context and found.choices == ("\u2028", "n")
    file.write_text(DEEP)
    with pytest.raises(BadInputError, match=r"mc\.jsonl:1: not JSON"):
        truthfulqa(file)
