"""Hand-made files in the official layouts of the nine tasks, with what makes each of them odd."""

from pathlib import Path

BOM = "\ufeff"
# A lone quotation mark, and a character that Unicode counts as a line end.
QUOTED, NEXT_LINE = 'he said " no', "two\u2028parts\x85here"
_MRPC = "#1 ID\t#2 ID\t#1 String\t#2 String"
_MNLI = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2"
_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"


def _numbered(head: str, rows: list[str]) -> str:
    return "\n".join([head, *(f"{i}\t{row}" for i, row in enumerate(rows))]) + "\n"


def _mnli(labels: list[str], annotators: int) -> str:
    head = [_MNLI, *(f"label{i + 1}" for i in range(annotators)), "gold_label"]
    rows = [
        "\t".join(["p", "q", "g", "(", "(", "(", "(", f"a {i}", f"b {i}", *["x"] * annotators, one])
        for i, one in enumerate(labels)
    ]
    return _numbered("\t".join(head), rows)


THREE = ["entailment", "neutral", "contradiction"]
FILES = {
    "CoLA/train.tsv": f"gj04\t1\t\tIt runs.\ngj04\t0\t*\t{QUOTED}\ncj99\t1\t\t{NEXT_LINE}\n",
    "CoLA/dev.tsv": "gj04\t1\t\tIt ran.\ngj04\t0\t*\tIt running.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tBill fell.\n1\tFell.\n",
    "SST-2/train.tsv": "sentence\tlabel\na charm \t1\n" + f"{QUOTED} \t0\n",
    "SST-2/dev.tsv": "sentence\tlabel\nit 's good \t1\nbleak \t0\n",
    "SST-2/test.tsv": "index\tsentence\n0\tuneasy .\n1\tfine\n2\tbad\n",
    # Line ends of Windows, as in the original files.
    "MRPC/train.tsv": f"{BOM}Quality\t{_MRPC}\r\n1\t7\t8\t{QUOTED}\tb\r\n",
    "MRPC/dev.tsv": f"{BOM}Quality\t{_MRPC}\r\n0\t7\t8\tc\td\r\n",
    "MRPC/test.tsv": f"{BOM}index\t{_MRPC}\r\n0\t7\t8\te\tf\r\n",
    "STS-B/train.tsv": _numbered(
        f"{_STSB}\tscore", ["g\tf\t2012\t1\tn\tn\ta\tb\t5.000", "g\tf\t2012\t2\tn\tn\tc\td\t0.500"]
    ),
    "STS-B/dev.tsv": _numbered(f"{_STSB}\tscore", ["g\tf\t2012\t1\tn\tn\te\tf\t2.5"]),
    "STS-B/test.tsv": _numbered(_STSB, ["g\tf\t2012\t1\tn\tn\tg\th"]),
    "RTE/train.tsv": _numbered(
        "index\tsentence1\tsentence2\tlabel", ["a\tb\tentailment", "c\td\tnot_entailment"]
    ),
    "RTE/dev.tsv": _numbered("index\tsentence1\tsentence2\tlabel", ["e\tf\tnot_entailment"]),
    "RTE/test.tsv": _numbered("index\tsentence1\tsentence2", ["g\th"]),
    "WNLI/train.tsv": _numbered("index\tsentence1\tsentence2\tlabel", ["a\tb\t1", "a\tc\t0"]),
    "WNLI/dev.tsv": _numbered("index\tsentence1\tsentence2\tlabel", ["e\tf\t0"]),
    "WNLI/test.tsv": _numbered("index\tsentence1\tsentence2", ["g\th"]),
    # The second example is broken in two, as some are.
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "3\t4\t5\tWhy?\tHow?\t0\n6\t7\t8\tWhat\nis it?\tWhich?\t1\n9\t1\t2\tWho?\tWhose?\t1\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n3\t4\t5\tA?\tB?\t1\n",
    "QQP/test.tsv": "id\tquestion1\tquestion2\n0\tC?\tD?\n",
    "QNLI/train.tsv": _numbered(
        "index\tquestion\tsentence\tlabel", ["Who?\tHe.\tentailment", "When?\tShe.\tnot_entailment"]
    ),
    "QNLI/dev.tsv": _numbered("index\tquestion\tsentence\tlabel", ["How?\tSo.\tentailment"]),
    "QNLI/test.tsv": _numbered("index\tquestion\tsentence", ["Why?\tThus."]),
    "MNLI/train.tsv": _mnli(THREE, 1),
    "MNLI/dev_matched.tsv": _mnli(THREE[:2], 5),
    "MNLI/dev_mismatched.tsv": _mnli(THREE[1:], 5),
    "MNLI/test_matched.tsv": _numbered(_MNLI, ["p\tq\tg\t(\t(\t(\t(\tc\td"]),
    "MNLI/test_mismatched.tsv": _numbered(_MNLI, ["p\tq\tg\t(\t(\t(\t(\te\tf"]),
    "diagnostic/diagnostic.tsv": _numbered("index\tsentence1\tsentence2", ["g\th", "i\tj"]),
}


def write(folder: Path) -> Path:
    """Writes all files, byte for byte, and returns the folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder
