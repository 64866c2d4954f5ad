// The viewer of an attribution graph: what it is of, and what the reader has chosen.
//
// All data is in the page: the document of graph_json.py, and what page.py adds to it. Its strings
// are set as text, never as markup.

const data = JSON.parse(byId("graph-data").textContent);
const graph = data.document;
const tokens = graph.metadata.prompt_tokens;

const oneLine = (text) => text.replaceAll("\n", "↵").trim() || "␣";
const layers = graph.nodes.filter((_, i) => ["feature", "error"].includes(data.kinds[i]))
  .map((node) => Number(node.layer));
const LAST_LAYER = Math.max(0, ...layers);

// Rows of the drawing, bottom to top: tokens, layers, logits.
const TOP_ROW = LAST_LAYER + 2;
const rowOf = (kind, layer) => (kind === "token" || kind === "bias" ? 0
  : kind === "logit" ? TOP_ROW : Number(layer) + 1);

// A feature by its number, which is its name where nothing else is known of it.
const numberName = (i) => `feature ${data.indices[i] ?? graph.nodes[i].feature} of layer ${graph.nodes[i].layer}`;

const nodes = graph.nodes.map((node, i) => ({
  i,
  id: node.node_id,
  kind: data.kinds[i],
  layer: node.layer,
  index: data.indices[i],
  row: rowOf(data.kinds[i], node.layer),
  position: node.ctx_idx,
  // Cumulative share; a node without one is never hidden.
  influence: node.influence ?? null,
  activation: node.activation ?? null,
  probability: node.token_prob ?? null,
  label: data.names[i],
  numbered: Boolean(node.clerp) || data.names[i] !== numberName(i),
}));
const indexOf = new Map(nodes.map((node) => [node.id, node.i]));

// What is constant is one node, unless the document has its own.
const constants = nodes.some((node) => node.kind === "bias") ? [] : graph.bias || [];
if (constants.length) {
  nodes.push({ i: nodes.length, id: "bias", kind: "bias", layer: "", index: null, row: 0,
    position: -1, influence: null, activation: null, probability: null, label: "bias",
    numbered: false });
}

// Edges, strongest first; `share` is the cumulative share of influence, `part` the absolute weight
// as a share of all edges into the target. What is constant carries no influence and comes last.
const edges = graph.links.map((link, i) => ({
  source: indexOf.get(link.source),
  target: indexOf.get(link.target),
  weight: link.weight,
  share: data.shares[i],
})).sort((a, b) => a.share - b.share);
const LINKS = edges.length;
for (const { node_id: id, bias } of constants) {
  if (bias) {
    edges.push({ source: nodes.length - 1, target: indexOf.get(id), weight: bias, share: Infinity });
  }
}
const inputs = nodes.map(() => []);
const outputs = nodes.map(() => []);
edges.forEach((edge, i) => {
  edge.i = i;
  inputs[edge.target].push(edge);
  outputs[edge.source].push(edge);
});
for (const list of inputs) {
  const total = list.reduce((sum, edge) => sum + Math.abs(edge.weight), 0);
  for (const edge of list) edge.part = total > 0 ? Math.abs(edge.weight) / total : 0;
  list.sort((a, b) => b.part - a.part);
}
for (const list of outputs) list.sort((a, b) => b.part - a.part);
const edgeKey = (source, target) => source * nodes.length + target;
const mediationOf = new Map((graph.mediation || [])
  .map((one) => [edgeKey(indexOf.get(one.source), indexOf.get(one.target)), one]));


// Attention scores by what makes them.
const scoreOf = new Map((graph.qk || []).map((one) =>
  [[one.layer, one.head, one.query, one.key].join(" "), one]));

// The strongest path to the likeliest logit, its nodes in order.
const path = data.path.map((i) => nodes[i]);

const LARGEST_INFLUENCE = Math.ceil(
  100 * Math.max(0, ...nodes.map((node) => node.influence ?? 0)) - 1e-6) / 100;
// So many edges at first.
const FIRST_EDGES = 400;
const firstEdges = () => (LINKS <= FIRST_EDGES ? 1
  : Math.max(0.01, Math.floor(100 * edges[FIRST_EDGES].share) / 100));

const state = {
  selected: null, // a node
  edge: null, // an edge of the selected node
  cursor: null, // the node that the keyboard is at
  pinned: new Set(), // nodes
  groups: [], // supernodes: { label, members: Set of nodes }
  nodeLimit: LARGEST_INFLUENCE,
  edgeLimit: 1,
};

const groupsOf = (node) => state.groups.filter((group) => group.members.has(node));

// Whether a node is drawn: what the reader chose stays.
function isShown(node) {
  return node.influence === null || node.kind === "token" || node.kind === "logit"
    || node.influence <= state.nodeLimit + 1e-9 || node === state.selected
    || state.pinned.has(node) || state.groups.some((group) => group.members.has(node));
}

const place = (node) => (node.position < 0 ? "" : ` at “${oneLine(tokens[node.position])}”`);

// Short, for a mark or a list; then in full.
const shortName = (node) => node.label;

function fullName(node) {
  if (node.kind === "token") return `${node.label}, position ${node.position}`;
  if (node.kind === "logit" || node.kind === "bias") return node.label;
  const feature = node.kind === "feature" && node.numbered ? `, ${numberName(node.i)}` : "";
  return `${node.label}${feature}${place(node)}, position ${node.position}`;
}

// Of any id, of nodes that are not drawn too.
const nameOf = (id) => (indexOf.has(id) ? fullName(nodes[indexOf.get(id)])
  : id in data.otherNames ? `${data.otherNames[id]} (pruned)` : id);

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);
const counted = (count, name) => `${whole(count)} ${name}${count === 1 ? "" : "s"}`;
