"""Official files of two tasks that a model learns in seconds."""

import numpy as np

FILLERS = ("the", "plot", "of", "a", "film", "and", "its", "end", "was", "one")


def sentences(count, seed):
    """Sentences that hold "good" or "bad", and labels that say which."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        words = list(rng.choice(FILLERS, 5))
        words.insert(int(rng.integers(6)), ("bad", "good")[i % 2])
        yield " ".join(words), i % 2


def write(folder):
    """Writes SST-2 that one word decides, and STS-B of a few pairs; returns the folder."""
    (folder / "SST-2").mkdir()
    for split, count in (("train", 64), ("dev", 16)):
        lines = [f"{text}\t{label}" for text, label in sentences(count, seed=count)]
        text = "\n".join(["sentence\tlabel", *lines]) + "\n"
        (folder / f"SST-2/{split}.tsv").write_text(text, "utf-8")
    lines = [f"{i}\t{text}" for i, (text, _) in enumerate(sentences(6, seed=6))]
    (folder / "SST-2/test.tsv").write_text("\n".join(["index\tsentence", *lines]) + "\n", "utf-8")
    (folder / "STS-B").mkdir()
    head = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
    for split, count in (("train", 8), ("dev", 6), ("test", 3)):
        score = split != "test"
        lines = [head + "\tscore" * score]
        for i, (text, label) in enumerate(sentences(count, seed=count)):
            cells = [str(i), *"gfyono", text, "the plot", *[str(5.0 * label)] * score]
            lines.append("\t".join(cells))
        (folder / f"STS-B/{split}.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    return folder
