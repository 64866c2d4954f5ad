"""One run of pretraining, and sentences of words that it knows."""

import json


def flags(request, folder):
    text = "the people of the town met in a house"
    sentence = {"concept": "place", "target": "house", "text": text}
    (folder / "places.jsonl").write_text(json.dumps(sentence), "utf-8")
    return [
        f"--run={request.getfixturevalue('run')}",
        f"--sentences={folder / 'places.jsonl'}",
        "--least_probability=0",
    ]
