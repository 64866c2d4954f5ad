// The panel: the selected node, its inputs and outputs, and what carries the selected edge.

const LISTED = 15;
const MAX_TEXTS = 5;
const KIND_NAMES = { feature: "feature", error: "error", token: "token", logit: "logit", bias: "bias" };

// The text that a screen reader hears of a node.
function say(node) {
  byId("live").textContent = node ? [
    fullName(node),
    node.kind,
    node.activation === null ? "" : `activation ${number(node.activation)}`,
    `${counted(shownInputs(node).length, "input")}, ${counted(shownOutputs(node).length, "output")}`,
    state.pinned.has(node) ? "pinned" : "",
    ...groupsOf(node).map((group) => `in supernode ${group.label}`),
    node === state.selected ? "selected" : "",
  ].filter(Boolean).join("; ") : "Nothing selected";
}

const shownInputs = (node) => inputs[node.i].filter((edge) => shown[edge.source]);
const shownOutputs = (node) => outputs[node.i].filter((edge) => shown[edge.target]);

function facts(pairs) {
  return el("dl", { class: "facts" }, ...pairs.filter(([, value]) => value !== null)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

const positionText = (position) => (position < 0 ? "every position"
  : `${position}, “${oneLine(tokens[position])}”`);

function showPanel() {
  const node = state.selected;
  if (node === null) {
    byId("panel").replaceChildren(el("p", { class: "absent" },
      "No node is selected. Choose one in the drawing."));
    return;
  }
  const pin = el("button", { type: "button", id: "pin", "aria-pressed": String(state.pinned.has(node)),
    on: { click: () => togglePin(node) } }, state.pinned.has(node) ? "Unpin" : "Pin");
  byId("panel").replaceChildren(
    el("h3", {}, el("bdi", {}, shortName(node)), ...(node.kind === "error" ? [place(node)] : [])),
    facts([
      ["kind", KIND_NAMES[node.kind]],
      ["feature", node.kind === "feature" && node.index !== null
        ? `${whole(node.index)} of layer ${node.layer}` : null],
      ["layer", node.kind === "error" ? String(node.layer) : null],
      ["position", positionText(node.position)],
      [node.kind === "logit" ? "logit" : "activation",
        node.activation === null ? null : number(node.activation)],
      ["probability", node.probability === null ? null : number(node.probability)],
      ["influence, cumulative", node.influence === null ? null : percent(node.influence)],
      ["id", node.id],
    ]),
    el("div", { class: "buttons" }, pin, groupChooser(node)),
    state.edge ? edgeDetail(state.edge) : "",
    ...interventionsOn(node),
    ...texts(node),
    edgeList("Strongest inputs", node, inputs[node.i], (edge) => nodes[edge.source]),
    edgeList("Strongest outputs", node, outputs[node.i], (edge) => nodes[edge.target]),
  );
}

// A menu that puts the node into a supernode.
function groupChooser(node) {
  const free = state.groups.filter((group) => !group.members.has(node));
  if (!free.length) return "";
  const menu = el("select", { "aria-label": "Add to a supernode", id: "add-to" },
    el("option", { value: "" }, "Add to supernode …"),
    ...free.map((group) => el("option", { value: String(state.groups.indexOf(group)) }, group.label)));
  menu.addEventListener("change", () => {
    if (menu.value !== "") {
      state.groups[Number(menu.value)].members.add(node);
      changed();
    }
  });
  return menu;
}

function texts(node) {
  const examples = node.index === null ? null : data.examples[`${node.layer}_${node.index}`];
  if (!examples) return [];
  // What is written below 0 is the negative of what is written above.
  const sign = node.activation < 0 ? -1 : 1;
  const [raised, lowered] = sign < 0 ? [examples.bottomLogits, examples.topLogits]
    : [examples.topLogits, examples.bottomLogits];
  const logits = [["Raises the logits of", raised], ["Lowers the logits of", lowered]]
    .filter(([, list]) => list.length);
  return [
    el("h4", {}, sign < 0 ? "Texts with its lowest activations" : "Texts that activate it most"),
    el("ol", { class: "texts" }, ...(sign < 0 ? examples.lowest : examples.texts).slice(0, MAX_TEXTS)
      .map((text) => activeText(text, sign))),
    ...logits.map(([name, list]) => el("p", { class: "small" }, `${name}: `,
      ...list.flatMap((token, i) => [i ? ", " : "", el("bdi", {}, `“${oneLine(token)}”`)]))),
  ];
}

function activeText({ tokens: words, activations }, sign) {
  const sizes = activations.map((activation) => Math.max(0, sign * activation));
  const most = Math.max(...sizes);
  return el("li", {}, ...words.map((word, i) => {
    const strength = most > 0 ? sizes[i] / most : 0;
    const mark = el("span", { class: "word hot", title: `activation ${number(activations[i])}` },
      word.replaceAll("\n", "↵"));
    mark.style.setProperty("--strength", strength.toFixed(3));
    return mark;
  }));
}

function edgeList(title, node, list, other) {
  const visible = list.filter((edge) => shown[other(edge).i]);
  const hidden = list.length - visible.length;
  const remarks = [
    visible.length > LISTED ? `${whole(visible.length - LISTED)} weaker ones are in the drawing` : "",
    hidden ? `${whole(hidden)} join hidden nodes` : "",
  ].filter(Boolean).join("; ");
  return el("section", { class: "edge-list" },
    el("h4", {}, `${title} (${whole(list.length)})`),
    list.length ? el("ul", {}, ...visible.slice(0, LISTED).map((edge) => edgeItem(edge, other(edge))))
      : el("p", { class: "absent" }, "None in this file."),
    el("p", { class: "small" }, remarks ? `${remarks}.` : ""));
}

function edgeItem(edge, other) {
  const chosen = edge === state.edge;
  const bar = el("span", { class: `part ${edge.weight < 0 ? "cold" : "hot"}`, "aria-hidden": "true" });
  bar.style.setProperty("--part", edge.part.toFixed(4));
  return el("li", {},
    el("button", { type: "button", class: "node", on: { click: () => select(other) } },
      el("bdi", {}, shortName(other)),
      other.kind === "feature" || other.kind === "error" ? el("small", {}, place(other)) : ""),
    el("button", { type: "button", class: "weight", "aria-pressed": String(chosen),
      title: "What carries this edge",
      "aria-label": `Edge of weight ${number(edge.weight)}, ${shortName(other)}${place(other)}`,
      on: { click: () => selectEdge(chosen ? null : edge) } },
    bar, number(edge.weight)));
}

// An edge, with the heads and the pairs of a query and a key that carry it.
function edgeDetail(edge) {
  const one = mediationOf.get(edgeKey(edge.source, edge.target));
  const [source, target] = [nodes[edge.source], nodes[edge.target]];
  const close = el("button", { type: "button", class: "remove", "aria-label": "Close the edge",
    on: { click: () => selectEdge(null) } }, "×");
  const parts = [el("div", { class: "group-head" }, el("h4", {}, "Selected edge"), close), facts([
    ["from", fullName(source)],
    ["to", fullName(target)],
    ["weight", number(edge.weight)],
    ["part of its inputs", percent(edge.part)],
    ["influence, cumulative", edge.share === Infinity ? null
      : `${percent(edge.share)} of the influence that passes through the edges of this file`],
  ])];
  if (!one) {
    parts.push(el("p", { class: "absent" }, source.kind === "bias"
      ? "A constant passes through no head." : "This file holds no mediation of this edge."));
  } else {
    const { heads = [], pairs = [] } = one;
    const row = (name, share) => el("tr", {}, el("td", {}, name),
      el("td", { class: "right" }, number(share)), el("td", { class: "right" }, signedPart(share, edge)));
    const table = (caption, name, list) => (list.length ? el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, name),
        el("th", { scope: "col", class: "right" }, "carries"),
        el("th", { scope: "col", class: "right" }, "of weight"))),
      el("tbody", {}, ...list)) : el("p", { class: "absent" }, `No ${name} carries any of it.`));
    parts.push(
      table("Heads", "head", heads.map(([layer, head, share]) => row(`L${layer}H${head}`, share))),
      table("Key and query positions", "pair", pairs.map(([layer, head, query, key, share]) =>
        row(`L${layer}H${head}: ${pairText(key)} → ${pairText(query)}`, share))),
      ...pairs.map(([layer, head, query, key]) => scoreOf.get([layer, head, query, key].join(" ")))
        .filter(Boolean).map(whyThere),
    );
  }
  return el("section", { id: "edge", "aria-label": "Selected edge" }, ...parts);
}

// Why a head looked from a query to a key: what makes the attention score.
function whyThere(one) {
  const item = (value, ...ids) => el("li", {}, `${number(value)}: `,
    ...ids.flatMap((id, i) => [i ? " with " : "", el("bdi", {}, nameOf(id))]));
  const part = (title, list) => (list.length ? [el("p", { class: "small" }, title), el("ul", {}, ...list)] : []);
  return el("details", { class: "why" },
    el("summary", {}, `Why L${one.layer}H${one.head} looks from ${pairText(one.query)} to ${
      pairText(one.key)}: score ${number(one.score)}`),
    ...part("Largest pairs, at the query with at the key",
      one.pair_wise_contributors.map(([query, key, value]) => item(value, query, key))),
    ...part("At the query, with the whole key",
      one.top_q_marginal_contributors.map(([id, value]) => item(value, id))),
    ...part("At the key, with the whole query",
      one.top_k_marginal_contributors.map(([id, value]) => item(value, id))));
}

const pairText = (position) => (position < tokens.length
  ? `${position} “${oneLine(tokens[position])}”` : String(position));
const signedPart = (share, edge) => (edge.weight === 0 ? "–"
  : withMinus(`${Math.round((100 * share) / edge.weight)} %`));

function showCounts() {
  const graphNodes = nodes.filter((node) => node.kind !== "bias" || indexOf.has(node.id));
  const visible = graphNodes.filter((node) => shown[node.i]).length;
  const within = edgesWithin(state.edgeLimit);
  let drawn = 0;
  for (let i = 0; i < within; i++) if (shown[edges[i].source] && shown[edges[i].target]) drawn++;
  const all = graphNodes.length;
  byId("shown").textContent = `${visible === all ? `All ${counted(all, "node")} are shown`
    : `${whole(visible)} of ${counted(all, "node")} are shown, ${whole(all - visible)} hidden`}; ${
    drawn === LINKS ? `all ${counted(LINKS, "edge")} are drawn`
      : `${whole(drawn)} of ${counted(LINKS, "edge")} are drawn, ${whole(LINKS - drawn)} hidden`}${
    state.selected ? "; the edges of the selected node are drawn whatever their strength" : ""}.`;
  byId("node-threshold-value").textContent = LARGEST_INFLUENCE
    ? percent(state.nodeLimit) : "100 %";
  byId("edge-threshold-value").textContent = percent(state.edgeLimit);
}

function showKinds() {
  const present = Object.keys(KIND_NAMES).filter((kind) => nodes.some((node) => node.kind === kind));
  byId("kinds").replaceChildren(...present.map((kind) => {
    const count = nodes.filter((node) => node.kind === kind).length;
    return el("li", { class: "key" }, el("canvas", { class: "mark", "data-kind": kind, width: 36, height: 36,
      "aria-hidden": "true" }), kind === "bias" ? "bias" : counted(count, KIND_NAMES[kind]));
  }), el("li", { class: "key" }, el("span", { class: "line hot", "aria-hidden": "true" }), "positive weight"),
  el("li", { class: "key" }, el("span", { class: "line cold", "aria-hidden": "true" }), "negative weight"),
  path.length ? el("li", { class: "key" }, el("span", { class: "line path", "aria-hidden": "true" }),
    "strongest path") : "",
  el("li", { class: "key" }, "framed: pinned"), el("li", { class: "key" }, "with a dot: in a supernode"));
  drawKinds();
}

function drawKinds() {
  for (const canvas of byId("kinds").querySelectorAll("canvas")) {
    const context = canvas.getContext("2d");
    const mark = stamp({ kind: canvas.dataset.kind });
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(mark, 0, 0, canvas.width, canvas.height);
  }
}
