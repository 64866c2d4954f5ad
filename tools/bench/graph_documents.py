"""Graph documents of any size with random links, without a model; some with hostile text."""

import numpy as np

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028 &amp; ]]>"


def synthetic(
    *, features=30, links=120, layers=4, positions=8, logits=3, seed=0, text="", scale=1.0
):
    """A document of `graph_json`: features and an error per layer and position, all kinds of node.

    Args:
      features, links: the number of features and of links; the links are those of a random causal
        graph.
      layers, positions, logits: sizes of the model and the prompt.
      seed: seed of everything random.
      text: a suffix of every token, label and prompt.
      scale: scale of the weights.
    """
    rng = np.random.default_rng(seed)
    tokens = [f" w{k}{text}" for k in range(positions)]
    nodes = []

    def add(name, feature_type, layer, position, feature, **more):
        nodes.append(
            {
                "node_id": name,
                "feature": feature,
                "layer": str(layer),
                "ctx_idx": position,
                "feature_type": feature_type,
                "jsNodeId": f"{feature_type}-{name}",
                "clerp": "",
                **more,
            }
        )

    places = rng.choice(layers * positions * 997, features, replace=False)
    for k, place in enumerate(sorted(places.tolist())):
        layer, position, index = (
            place % layers,
            place // layers % positions,
            place // (layers * positions),
        )
        both = layer + index
        number = both * (both + 1) // 2 + index
        label = f"label {k}{text}" if k % 3 == 0 else ""
        activation = float(rng.exponential())
        name, kind = f"{layer}_{index}_{position}", "cross layer transcoder"
        add(name, kind, layer, position, number, clerp=label, activation=activation)
    for layer in range(layers):
        for position in range(0, positions, 3):
            name = f"0_{layer}_{position}_error"
            add(name, "mlp reconstruction error", layer, position, -1)
    for position, token in enumerate(tokens):
        add(f"E_{position}_{position}", "embedding", "E", position, position, clerp=f"Emb: {token}")
    probabilities = np.sort(rng.dirichlet(np.ones(logits)))[::-1] * 0.95
    for k, probability in enumerate(probabilities.tolist()):
        clerp = f'Output " next{k}{text}" (p={probability:.3f})'
        add(
            f"{layers + 1}_{k}_{positions - 1}",
            "logit",
            layers + 1,
            positions - 1,
            k,
            clerp=clerp,
            activation=1.0 + k,
            token_prob=probability,
            is_target_logit=k == 0,
        )
    shares = np.sort(rng.uniform(0.05, 0.9, len(nodes)))
    for node, share in zip(rng.permutation(np.asarray(nodes, object)), shares, strict=True):
        if node["feature_type"] != "logit":
            node["influence"] = float(share)
    order = {
        "embedding": lambda node: -1,
        "mlp reconstruction error": lambda node: int(node["layer"]) + 0.5,
        "cross layer transcoder": lambda node: int(node["layer"]),
        "logit": lambda node: layers + 1,
    }
    depth = np.asarray([order[node["feature_type"]](node) for node in nodes])
    position = np.asarray([node["ctx_idx"] for node in nodes])
    reads = np.asarray(
        [node["feature_type"] in ("cross layer transcoder", "logit") for node in nodes]
    )
    allowed = (
        (depth[:, None] > depth[None]) & (position[:, None] >= position[None]) & reads[:, None]
    )
    pairs = np.argwhere(allowed)
    chosen = pairs[np.sort(rng.choice(len(pairs), min(links, len(pairs)), replace=False))]
    weights = scale * rng.normal(size=len(chosen)) * rng.exponential(size=len(chosen))
    ends = [
        {"source": nodes[s]["node_id"], "target": nodes[t]["node_id"]} for t, s in chosen.tolist()
    ]
    mediation = [
        {
            **end,
            "heads": [[0, 1, weight / 2], [2, 0, -weight / 8]],
            "pairs": [[0, 1, positions - 1, 1, weight / 4]],
        }
        for end, weight in list(zip(ends, weights.tolist(), strict=True))[::2]
    ]
    return {
        "metadata": {
            "slug": "a-synthetic-graph",
            "scan": "no-model",
            "prompt_tokens": tokens,
            "prompt": "".join(tokens),
            "node_threshold": 0.8,
            "pruning_settings": {"node_threshold": 0.8, "edge_threshold": 0.95},
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": ""},
        "nodes": nodes,
        "links": [
            {**end, "weight": weight} for end, weight in zip(ends, weights.tolist(), strict=True)
        ],
        "mediation": mediation,
        "bias": [
            {"node_id": node["node_id"], "bias": float(rng.normal())}
            for node, each in zip(nodes, reads, strict=True)
            if each
        ],
    }
