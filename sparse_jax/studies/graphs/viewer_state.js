// The view as an address and as a file, and the start of the page.

const FORMAT = "attribution-graph-view";
const CONSTANT = constants.length ? "bias" : null;

function select(node) {
  state.selected = node;
  state.edge = null;
  state.cursor = node || state.cursor;
  changed();
  if (node) reveal(node);
  say(node);
}

function selectEdge(edge) {
  state.edge = edge;
  changed();
  if (edge) byId("edge").scrollIntoView({ block: "nearest" });
}

// The view as plain data; both ends read it by `readView`.
function view() {
  return {
    format: FORMAT,
    version: 1,
    slug: graph.metadata.slug,
    pinnedIds: [...state.pinned].map((node) => node.id),
    supernodes: state.groups.map((group) => [group.label, ...[...group.members].map((node) => node.id)]),
    clickedId: state.selected ? state.selected.id : "",
    clickedLink: state.edge ? [state.edge.source, state.edge.target].map((i) => nodes[i].id) : [],
    nodeThreshold: state.nodeLimit,
    edgeThreshold: state.edgeLimit,
  };
}

const isText = (value) => typeof value === "string";
const isTexts = (value) => Array.isArray(value) && value.every(isText);
const isShare = (value) => typeof value === "number" && value >= 0 && value <= 1;

// What is wrong with a view, or nothing.
function fault(one) {
  if (one === null || typeof one !== "object" || one.format !== FORMAT) {
    return "it is no saved view of an attribution graph";
  }
  if (one.version !== 1) return `its version is ${one.version}, and this page reads 1`;
  if (one.slug !== graph.metadata.slug) {
    return `it is of the graph “${one.slug}”, this page of “${graph.metadata.slug}”`;
  }
  if (!isTexts(one.pinnedIds)) return "pinnedIds is no list of ids";
  if (!Array.isArray(one.supernodes) || !one.supernodes.every((group) => isTexts(group) && group.length)) {
    return "supernodes is no list of lists of a label and ids";
  }
  if (new Set(one.supernodes.map(([label]) => label)).size < one.supernodes.length) {
    return "two supernodes have the same label";
  }
  if (!isText(one.clickedId)) return "clickedId is no id";
  if (!isTexts(one.clickedLink)) return "clickedLink is no list of ids";
  if (!isShare(one.nodeThreshold) || !isShare(one.edgeThreshold)) return "a threshold is not within 0 and 1";
  const ids = [...one.pinnedIds, ...one.supernodes.flatMap((group) => group.slice(1)),
    ...(one.clickedId ? [one.clickedId] : [])];
  const unknown = ids.find((id) => !nodeOf(id));
  if (unknown !== undefined) return `this graph has no node “${unknown}”`;
  return one.clickedLink.length && !linkOf(one)
    ? `node “${one.clickedId}” has no edge ${one.clickedLink.map((id) => `“${id}”`).join(" to ")}` : "";
}

const nodeOf = (id) => (indexOf.has(id) ? nodes[indexOf.get(id)]
  : id === CONSTANT ? nodes[nodes.length - 1] : null);

// The clicked edge, which is one of the clicked node.
function linkOf({ clickedId, clickedLink: [source, target] }) {
  const node = nodeOf(clickedId);
  return node && [...inputs[node.i], ...outputs[node.i]]
    .find((edge) => nodes[edge.source].id === source && nodes[edge.target].id === target);
}

function readView(one) {
  state.pinned = new Set(one.pinnedIds.map(nodeOf));
  state.groups = [];
  for (const [label, ...ids] of one.supernodes) {
    state.groups.push({ label: freeLabel(label), members: new Set(ids.map(nodeOf)) });
  }
  state.selected = one.clickedId ? nodeOf(one.clickedId) : null;
  state.edge = (one.clickedLink.length && linkOf(one)) || null;
  state.cursor = state.selected;
  state.nodeLimit = Math.min(one.nodeThreshold, LARGEST_INFLUENCE);
  state.edgeLimit = one.edgeThreshold;
  changed();
  if (state.selected) reveal(state.selected);
}

// What the document asks for, or else the likeliest logit; ids that it does not have are named.
function firstView() {
  const { pinnedIds = [], supernodes = [], clickedId = "" } = graph.qParams;
  const wanted = {
    pinnedIds: isTexts(pinnedIds) ? pinnedIds : [],
    supernodes: Array.isArray(supernodes) ? supernodes.filter((group) => isTexts(group) && group.length) : [],
    clickedId: isText(clickedId) ? clickedId : "",
  };
  const unknown = [...wanted.pinnedIds, ...wanted.supernodes.flatMap((group) => group.slice(1)),
    wanted.clickedId].filter((id) => id && !nodeOf(id));
  const known = (ids) => ids.filter(nodeOf);
  const [likeliest] = nodes.filter((node) => node.kind === "logit")
    .sort((a, b) => (b.probability ?? 0) - (a.probability ?? 0));
  readView({
    pinnedIds: known(wanted.pinnedIds),
    supernodes: wanted.supernodes.map(([label, ...ids]) => [label, ...known(ids)]),
    clickedId: nodeOf(wanted.clickedId) ? wanted.clickedId : likeliest ? likeliest.id : "",
    clickedLink: [],
    nodeThreshold: LARGEST_INFLUENCE,
    edgeThreshold: firstEdges(),
  });
  tell(unknown.length ? `Left out of qParams, because the graph has no such node: ${unknown.join(", ")}.` : "");
}

function tell(text) {
  byId("message").textContent = text;
}

// Draws all that depends on the state, at once, and writes the address a little later.
let writing = 0;
function changed() {
  shown = nodes.map(isShown);
  if (state.cursor && !shown[state.cursor.i]) state.cursor = null;
  byId("node-threshold").value = state.nodeLimit;
  byId("edge-threshold").value = state.edgeLimit;
  showCounts();
  keepFocus(() => {
    showPanel();
    showGroups();
  });
  redraw();
  clearTimeout(writing);
  writing = setTimeout(writeAddress, 250);
}

// Lists are made anew; the keyboard stays at the element that has the same name.
function keepFocus(make) {
  const before = document.activeElement;
  const name = before?.getAttribute("aria-label") || before?.textContent;
  const list = before?.closest("#panel, #pins, #supernodes, #proposals");
  const selector = before?.tagName.toLowerCase();
  make();
  if (!list || before.isConnected) return;
  const again = [...list.querySelectorAll(selector)]
    .find((one) => (one.getAttribute("aria-label") || one.textContent) === name);
  (again || list.querySelector("button, input") || scroller).focus({ preventScroll: true });
}

// A slider moves often: lists wait until it rests.
let resting = 0;
function moveSlider() {
  state.nodeLimit = byId("node-threshold").valueAsNumber;
  state.edgeLimit = byId("edge-threshold").valueAsNumber;
  shown = nodes.map(isShown);
  showCounts();
  redraw();
  clearTimeout(resting);
  resting = setTimeout(changed, 120);
}

let written = "";
function writeAddress() {
  written = `#view=${encodeURIComponent(JSON.stringify(view()))}`;
  if (location.hash !== written) history.replaceState(null, "", written);
}

// Reads the view in the address; other hashes are links inside the page and change nothing.
function readAddress() {
  if (!location.hash.startsWith("#view=") || location.hash === written) return;
  readText(decodedHash(), "The view in the address");
}

function decodedHash() {
  try {
    return decodeURIComponent(location.hash.slice("#view=".length));
  } catch {
    return "";
  }
}

function readText(text, name) {
  let one = null;
  try {
    one = JSON.parse(text);
  } catch {
    tell(`${name} was not read: it is no JSON.`);
    return;
  }
  const wrong = fault(one);
  if (wrong) tell(`${name} was not read: ${wrong}.`);
  else {
    readView(one);
    tell("");
  }
}

function download(name, value) {
  const address = URL.createObjectURL(new Blob([`${JSON.stringify(value, null, 1)}\n`],
    { type: "application/json" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// The document with the view in its qParams, for this viewer and others.
function documentWithView() {
  const { pinnedIds, supernodes, clickedId } = view();
  const known = (ids) => ids.filter((id) => indexOf.has(id));
  return { ...graph, qParams: {
    ...graph.qParams,
    pinnedIds: known(pinnedIds),
    supernodes: supernodes.map(([label, ...ids]) => [label, ...known(ids)]),
    clickedId: indexOf.has(clickedId) ? clickedId : "",
  } };
}

async function load(event) {
  const [file] = event.target.files;
  if (file) {
    readText(await file.text(), `The file ${file.name}`);
    event.target.value = "";
  }
}

function start() {
  byId("viewer").hidden = false;
  byId("node-threshold").max = LARGEST_INFLUENCE;
  byId("node-threshold").disabled = LARGEST_INFLUENCE === 0;
  for (const name of ["node-threshold", "edge-threshold"]) byId(name).addEventListener("input", moveSlider);
  byId("save-view").addEventListener("click", () => download(`${graph.metadata.slug}-view.json`, view()));
  byId("save-graph").addEventListener("click", () =>
    download(`${graph.metadata.slug}.json`, documentWithView()));
  byId("load-view").addEventListener("change", load);
  byId("reset-view").addEventListener("click", firstView);
  window.addEventListener("hashchange", readAddress);
  startCanvas();
  startGroups();
  shown = nodes.map(isShown);
  resize();
  showKinds();
  firstView();
  readAddress();
}

start();
