"""Interventions on the graph documents of `tools.bench.graph_documents`, with effects."""


def intervention(source, target, *, factor=-5.0):
    """An intervention on a source of a document, with one effect."""
    measured = {"predicted": 1.25, "frozen": 1.26, "attention_frozen": -0.75, "free": 0.5}
    return {"source": source, "factor": factor, "effects": [{"target": target} | measured]}


def group_intervention(members, *, factor=-5.0, text=""):
    """An intervention on a group of sources of a document, in two modes."""
    outcomes = [
        {
            "mode": mode,
            "change": change,
            "probability": 0.125,
            "top": [{"token": f" most{text}", "id": 3, "probability": 0.625}],
        }
        for mode, change in (("attention_frozen", -2.5), ("free", 0.375))
    ]
    return {"members": members, "factor": factor, "predicted": -1.5, "outcomes": outcomes}


def group_score(members):
    """How far a group of sources of a document acts as one."""
    return {"members": members, "removed": 2, "within": 0.75, "outside": None, "off": 0.125}
