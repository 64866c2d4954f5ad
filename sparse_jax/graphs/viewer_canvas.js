// The drawing: layers by positions on two canvases, edges below nodes, both as large as the frame.
//
// The scroller over them is as large as the frame too and holds an empty box of the drawing's whole
// extent; what is in view is drawn. Edges are drawn strongest first, a few milliseconds per frame,
// each batch under the one before it, so that a slider never waits for 50,000 of them.

const SPACING = 14;
const RADIUS = 4.5;
const GUTTER = { left: 52, right: 10, top: 8, bottom: 24 };
const SLICE = 6; // milliseconds of a frame for edges
const BUCKET = 32; // pixels, of the grid that finds the node under the pointer

const frame = byId("frame");
const scroller = byId("scroller");
const canvases = { edges: byId("edges"), nodes: byId("nodes") };
const ink = {};
let columns = []; // { position, left, width, label }
let rows = []; // by row: { middle, height }
let extent = { width: 0, height: 0 };
let buckets = new Map();
let shown = []; // by node
let hovered = null;
let pending = false;
let job = null;

function readInk() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "panel", "ink", "soft", "hair", "axis", "link", "s0", "s1"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const name of ["hot", "cold"]) {
    ink[name] = `rgb(${style.getPropertyValue(`--${name}`).trim().split(/\s+/).join(",")})`;
  }
}

// Places of all nodes, which stay when thresholds change.
function layOut() {
  const cells = new Map();
  for (const node of nodes) {
    const key = `${node.position} ${node.row}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(node);
  }
  const first = nodes.some((node) => node.position < 0) ? -1 : 0;
  columns = [];
  for (let position = first; position < tokens.length; position++) {
    const most = Math.max(0, ...[...cells].filter(([key]) => key.startsWith(`${position} `))
      .map(([, cell]) => cell.length));
    const label = position < 0 ? "bias" : oneLine(tokens[position]);
    columns.push({ position, label, width: Math.max(40, SPACING * Math.ceil(1.6 * Math.sqrt(most)) + 14) });
  }
  const wanted = columns.reduce((sum, column) => sum + column.width, 0);
  const room = scroller.clientWidth - GUTTER.left - GUTTER.right;
  const stretch = Math.max(1, room / wanted);
  let left = GUTTER.left;
  for (const column of columns) {
    column.left = left;
    column.width *= stretch;
    left += column.width;
  }
  extent.width = left + GUTTER.right;
  const perLine = (column) => Math.max(1, Math.floor((column.width - 8) / SPACING));
  const columnAt = new Map(columns.map((column) => [column.position, column]));
  rows = Array.from({ length: TOP_ROW + 1 }, () => ({ height: 26 }));
  for (const [key, cell] of cells) {
    const [position, row] = key.split(" ").map(Number);
    const lines = Math.ceil(cell.length / perLine(columnAt.get(position)));
    rows[row].height = Math.max(rows[row].height, lines * SPACING + 14);
  }
  const height = rows.reduce((sum, row) => sum + row.height, 0);
  const spread = Math.max(1, (380 - GUTTER.top - GUTTER.bottom) / height);
  let top = GUTTER.top;
  for (const row of [...rows].reverse()) {
    row.height *= spread;
    row.middle = top + row.height / 2;
    top += row.height;
  }
  extent.height = top + GUTTER.bottom;
  buckets = new Map();
  for (const [key, cell] of cells) {
    const [position, row] = key.split(" ").map(Number);
    const column = columnAt.get(position);
    const count = perLine(column);
    const lines = Math.ceil(cell.length / count);
    cell.sort((a, b) => (a.influence ?? 0) - (b.influence ?? 0) || a.i - b.i);
    cell.forEach((node, k) => {
      const line = Math.floor(k / count);
      const inLine = Math.min(count, cell.length - line * count);
      node.x = column.left + column.width / 2 + ((k % count) - (inLine - 1) / 2) * SPACING;
      node.y = rows[row].middle + (line - (lines - 1) / 2) * SPACING;
      const bucket = `${Math.floor(node.x / BUCKET)} ${Math.floor(node.y / BUCKET)}`;
      if (!buckets.has(bucket)) buckets.set(bucket, []);
      buckets.get(bucket).push(node);
    });
  }
}

function resize() {
  readInk();
  frame.style.height = "";
  layOut();
  const most = Math.max(260, Math.min(640, window.innerHeight * 0.75));
  frame.style.height = `${Math.min(extent.height + 2, most)}px`;
  // A scroll bar takes room; lay out once more with what is left.
  byId("extent").style.cssText = `width:${extent.width}px;height:${extent.height}px`;
  if (scroller.clientWidth < extent.width && extent.width - scroller.clientWidth < 24) {
    layOut();
    byId("extent").style.cssText = `width:${extent.width}px;height:${extent.height}px`;
  }
  const ratio = window.devicePixelRatio || 1;
  for (const canvas of Object.values(canvases)) {
    canvas.width = Math.round(scroller.clientWidth * ratio);
    canvas.height = Math.round(scroller.clientHeight * ratio);
    canvas.style.width = `${scroller.clientWidth}px`;
    canvas.style.height = `${scroller.clientHeight}px`;
  }
  redraw();
}

// Draws at the next frame; many requests are one.
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    startEdges();
    drawNodes();
  });
}

function prepared(canvas, clip) {
  const context = canvas.getContext("2d");
  const ratio = window.devicePixelRatio || 1;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, scroller.clientWidth, scroller.clientHeight);
  if (clip) context.translate(-scroller.scrollLeft, -scroller.scrollTop);
  return context;
}

// The first edge whose share is beyond the limit.
function edgesWithin(limit) {
  let [low, high] = [0, LINKS];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (edges[middle].share <= limit + 1e-9) low = middle + 1;
    else high = middle;
  }
  return low;
}

function startEdges() {
  const context = prepared(canvases.edges, true);
  context.globalCompositeOperation = "destination-over";
  context.lineCap = "butt";
  context.globalAlpha = state.selected ? 0.1 : 0.3;
  job = { context, next: 0, end: edgesWithin(state.edgeLimit) };
  drawEdges(job);
}

function drawEdges(one) {
  if (one !== job) return;
  const { context } = one;
  const stop = performance.now() + SLICE;
  const [top, bottom] = [scroller.scrollTop, scroller.scrollTop + scroller.clientHeight];
  const [left, right] = [scroller.scrollLeft, scroller.scrollLeft + scroller.clientWidth];
  while (one.next < one.end && performance.now() < stop) {
    const until = Math.min(one.end, one.next + 64);
    for (; one.next < until; one.next++) {
      const edge = edges[one.next];
      if (!shown[edge.source] || !shown[edge.target]) continue;
      const [a, b] = [nodes[edge.source], nodes[edge.target]];
      if (Math.max(a.y, b.y) < top || Math.min(a.y, b.y) > bottom) continue;
      if (Math.max(a.x, b.x) < left || Math.min(a.x, b.x) > right) continue;
      context.beginPath();
      context.moveTo(a.x, a.y);
      context.lineTo(b.x, b.y);
      context.strokeStyle = edge.weight < 0 ? ink.cold : ink.hot;
      context.lineWidth = 0.6 + 3 * Math.sqrt(edge.part);
      context.stroke();
    }
  }
  if (one.next < one.end) requestAnimationFrame(() => drawEdges(one));
  else canvases.edges.dataset.drawn = one.end;
}

// The edges of the selected node that join shown nodes, weakest first.
const selectedEdges = () => (state.selected === null ? []
  : [...inputs[state.selected.i], ...outputs[state.selected.i]]
    .filter((edge) => shown[edge.source] && shown[edge.target])
    .sort((a, b) => a.part - b.part));

function drawNodes() {
  const context = prepared(canvases.nodes, true);
  const [left, top] = [scroller.scrollLeft, scroller.scrollTop];
  const [width, height] = [scroller.clientWidth, scroller.clientHeight];
  context.lineWidth = 1;
  for (const edge of selectedEdges()) {
    const [a, b] = [nodes[edge.source], nodes[edge.target]];
    context.beginPath();
    context.moveTo(a.x, a.y);
    context.lineTo(b.x, b.y);
    context.globalAlpha = edge === state.edge ? 1 : 0.75;
    context.strokeStyle = edge === state.edge ? ink.ink : edge.weight < 0 ? ink.cold : ink.hot;
    context.setLineDash(edge.weight < 0 ? [5, 3] : []);
    context.lineWidth = (edge === state.edge ? 1.5 : 0.8) + 5 * Math.sqrt(edge.part);
    context.stroke();
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
  const ends = new Set(selectedEdges().flatMap((edge) => [edge.source, edge.target]));
  for (const node of nodes) {
    if (!shown[node.i] || node.y < top - 9 || node.y > top + height + 9) continue;
    if (node.x < left - 9 || node.x > left + width + 9) continue;
    context.globalAlpha = state.selected && !ends.has(node.i) && node !== state.selected ? 0.45 : 1;
    drawNode(context, node);
  }
  context.globalAlpha = 1;
  drawAxes(context, left, top, width, height);
}

// A mark by kind: circle, diamond, square, triangle, cross.
function tracePath(context, kind, x, y, size) {
  context.beginPath();
  if (kind === "feature") context.arc(x, y, size, 0, 2 * Math.PI);
  else if (kind === "error") polygon(context, [[x, y - size - 1], [x + size + 1, y], [x, y + size + 1], [x - size - 1, y]]);
  else if (kind === "token") context.rect(x - size, y - size, 2 * size, 2 * size);
  else if (kind === "logit") polygon(context, [[x, y - size - 1], [x + size + 1, y + size], [x - size - 1, y + size]]);
  else {
    context.moveTo(x - size, y);
    context.lineTo(x + size, y);
    context.moveTo(x, y - size);
    context.lineTo(x, y + size);
  }
}

function polygon(context, points) {
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
}

function drawNode(context, node) {
  const { kind, x, y } = node;
  tracePath(context, kind, x, y, RADIUS);
  const grouped = groupsOf(node).length > 0;
  context.fillStyle = node === state.selected ? ink.ink : grouped ? ink.s1
    : kind === "error" ? ink.page : ink.s0;
  context.strokeStyle = kind === "bias" || node === state.selected ? ink.ink
    : kind === "error" ? ink.soft : ink.page;
  context.lineWidth = kind === "bias" ? 2.5 : kind === "error" ? 1.5 : 1;
  if (kind !== "bias") context.fill();
  context.stroke();
  context.strokeStyle = ink.ink;
  if (state.pinned.has(node)) {
    context.lineWidth = 1.5;
    context.strokeRect(x - RADIUS - 3, y - RADIUS - 3, 2 * RADIUS + 6, 2 * RADIUS + 6);
  }
  if (grouped) {
    context.fillStyle = ink.page;
    context.fillRect(x - 1.5, y - 1.5, 3, 3);
  }
  if (node === hovered || node === state.selected || (node === state.cursor && scrollerHasFocus())) {
    context.lineWidth = node === state.cursor ? 2.5 : 1.5;
    context.strokeStyle = node === state.cursor && scrollerHasFocus() ? ink.link : ink.ink;
    context.beginPath();
    context.arc(x, y, RADIUS + 4.5, 0, 2 * Math.PI);
    context.stroke();
  }
}

const scrollerHasFocus = () => document.activeElement === scroller;

// Layers at the left and tokens at the bottom stay in view.
function drawAxes(context, left, top, width, height) {
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = ink.page;
  context.fillRect(left, top, GUTTER.left - 6, height);
  context.fillRect(left, top + height - GUTTER.bottom, width, GUTTER.bottom);
  context.fillStyle = ink.soft;
  context.textBaseline = "middle";
  context.textAlign = "right";
  rows.forEach((row, i) => {
    if (row.middle > top + height - GUTTER.bottom) return;
    const name = i === 0 ? "tokens" : i === TOP_ROW ? "logits" : `L${i - 1}`;
    context.fillText(name, left + GUTTER.left - 10, row.middle);
  });
  context.textAlign = "center";
  context.save();
  context.beginPath();
  context.rect(left + GUTTER.left - 6, top + height - GUTTER.bottom, width, GUTTER.bottom);
  context.clip();
  for (const column of columns) {
    context.fillText(fitted(context, column.label, column.width - 4),
      column.left + column.width / 2, top + height - GUTTER.bottom / 2);
  }
  context.restore();
}

function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}

function nodeAt(x, y) {
  let [best, least] = [null, (RADIUS + 6) ** 2];
  const [i, j] = [Math.floor(x / BUCKET), Math.floor(y / BUCKET)];
  for (let a = i - 1; a <= i + 1; a++) {
    for (let b = j - 1; b <= j + 1; b++) {
      for (const node of buckets.get(`${a} ${b}`) || []) {
        const size = (node.x - x) ** 2 + (node.y - y) ** 2;
        if (shown[node.i] && size < least) [best, least] = [node, size];
      }
    }
  }
  return best;
}

// The edge of the selected node nearest to a point, within six pixels.
function edgeAt(x, y) {
  let [best, least] = [null, 6];
  for (const edge of selectedEdges()) {
    const [a, b] = [nodes[edge.source], nodes[edge.target]];
    const [dx, dy] = [b.x - a.x, b.y - a.y];
    const along = Math.max(0, Math.min(1, ((x - a.x) * dx + (y - a.y) * dy) / (dx * dx + dy * dy)));
    const size = Math.hypot(a.x + along * dx - x, a.y + along * dy - y);
    if (size < least) [best, least] = [edge, size];
  }
  return best;
}

function pointAt(event) {
  const box = scroller.getBoundingClientRect();
  return [event.clientX - box.left + scroller.scrollLeft, event.clientY - box.top + scroller.scrollTop];
}

function point(event) {
  const [x, y] = pointAt(event);
  const node = nodeAt(x, y);
  if (node !== hovered) {
    hovered = node;
    scroller.style.cursor = node ? "pointer" : "";
    requestAnimationFrame(drawNodes);
  }
  const tip = byId("tip");
  tip.hidden = node === null;
  if (node === null) return;
  tip.textContent = `${fullName(node)}${node.activation === null ? "" : `, activation ${number(node.activation)}`}`;
  const box = frame.getBoundingClientRect();
  const at = event.clientX - box.left;
  tip.style.left = `${Math.max(4, Math.min(at + 12, box.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${event.clientY - box.top + 16}px`;
}

function click(event) {
  const [x, y] = pointAt(event);
  const node = nodeAt(x, y);
  if (node) select(node);
  else {
    const edge = edgeAt(x, y);
    if (edge) selectEdge(edge);
    else select(null);
  }
}

// The node that an arrow key leads to: along a row, or the nearest in the next row with nodes.
function neighbour(node, key) {
  const inRow = (row) => nodes.filter((one) => shown[one.i] && one.row === row)
    .sort((a, b) => a.x - b.x || a.y - b.y);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const row = inRow(node.row);
    return row[row.indexOf(node) + (key === "ArrowRight" ? 1 : -1)] || node;
  }
  const step = key === "ArrowUp" ? 1 : -1;
  for (let row = node.row + step; row >= 0 && row <= TOP_ROW; row += step) {
    const found = inRow(row);
    if (found.length) {
      return found.reduce((a, b) => (Math.abs(b.x - node.x) < Math.abs(a.x - node.x) ? b : a));
    }
  }
  return node;
}

function pressKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const at = state.cursor || state.selected;
  if (event.key.startsWith("Arrow")) {
    moveTo(at ? neighbour(at, event.key) : nodes.find((node) => shown[node.i] && node.kind === "logit")
      || nodes.find((node) => shown[node.i]));
  } else if (event.key === "Enter" && at) select(at);
  else if (event.key.toLowerCase() === "p" && at) togglePin(at);
  else if (event.key === "Escape") {
    if (state.edge) selectEdge(null);
    else select(null);
  } else return;
  event.preventDefault();
}

function moveTo(node) {
  if (!node) return;
  state.cursor = node;
  reveal(node);
  say(node);
  redraw();
}

// Scrolls the drawing, and not the page, until a node is in it.
function reveal(node) {
  const { scrollLeft, scrollTop, clientWidth, clientHeight } = scroller;
  if (node.x < scrollLeft + GUTTER.left + 10) scroller.scrollLeft = node.x - GUTTER.left - 40;
  else if (node.x > scrollLeft + clientWidth - 12) scroller.scrollLeft = node.x - clientWidth + 40;
  if (node.y < scrollTop + 12) scroller.scrollTop = node.y - 40;
  else if (node.y > scrollTop + clientHeight - GUTTER.bottom - 12) {
    scroller.scrollTop = node.y - clientHeight + GUTTER.bottom + 40;
  }
}

function startCanvas() {
  scroller.addEventListener("scroll", redraw, { passive: true });
  scroller.addEventListener("pointermove", point);
  scroller.addEventListener("pointerleave", () => {
    hovered = null;
    byId("tip").hidden = true;
    redraw();
  });
  scroller.addEventListener("click", click);
  scroller.addEventListener("keydown", pressKey);
  scroller.addEventListener("focus", () => {
    if (!state.cursor && state.selected) state.cursor = state.selected;
    redraw();
  });
  scroller.addEventListener("blur", redraw);
  let width = 0;
  new ResizeObserver(() => {
    if (frame.clientWidth !== width) {
      width = frame.clientWidth;
      resize();
    }
  }).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
}
