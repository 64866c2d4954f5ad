"""A file of texts, of which every split gives sentences."""

import json


def flags(request, folder):
    del request
    texts = [f"The dog did not find house {i} of the town." for i in range(40)]
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "texts.jsonl").write_text("\n".join(rows), "utf-8")
    return [f"--corpus={folder / 'texts.jsonl'}", "--splits=train,validation,test"]
