// The drawing: layers by positions on two canvases, edges below nodes, both as large as the frame.
//
// The scroller over them is as large as the frame too and holds an empty box of the drawing's whole
// extent; what is in view is drawn. Edges are drawn strongest first, some per frame, each batch
// under the one before it, so that a slider never waits for 50,000 of them. A canvas draws after
// the script that asks for it, so the size of a batch follows from the time between frames.

const BATCH = { least: 100, most: 5000, slow: 30, fast: 20 }; // edges; milliseconds of a frame

const canvases = { edges: byId("edges"), nodes: byId("nodes") };
const ink = {};
let shown = []; // by node
let hovered = null;
let pending = null; // what the next frame draws
let job = null;
let batch = 500;
const stamps = new Map(); // marks that are drawn already, by look

function readInk() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "panel", "ink", "soft", "hair", "axis", "link", "s0", "s1"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const name of ["hot", "cold"]) {
    ink[name] = `rgb(${style.getPropertyValue(`--${name}`).trim().split(/\s+/).join(",")})`;
  }
}

function resize() {
  readInk();
  stamps.clear();
  const most = Math.max(260, Math.min(640, window.innerHeight * 0.75));
  layOut(ROOMY);
  if (extent.width > frame.clientWidth || extent.height > most) layOut(DENSE);
  // Room for the bar that scrolls sideways.
  const bar = extent.width > frame.clientWidth ? 18 : 2;
  frame.style.height = `${Math.min(extent.height + bar, most)}px`;
  byId("extent").style.cssText = `width:${extent.width}px;height:${extent.height}px`;
  const ratio = window.devicePixelRatio || 1;
  for (const canvas of Object.values(canvases)) {
    canvas.width = Math.round(scroller.clientWidth * ratio);
    canvas.height = Math.round(scroller.clientHeight * ratio);
    canvas.style.width = `${scroller.clientWidth}px`;
    canvas.style.height = `${scroller.clientHeight}px`;
  }
  drawKinds();
  redraw();
}

// Draws at the next frame, edges too unless told otherwise; many requests are one.
function redraw(withEdges = true) {
  if (pending) {
    pending.withEdges ||= withEdges;
    return;
  }
  pending = { withEdges };
  requestAnimationFrame(() => {
    const wanted = pending;
    pending = null;
    if (wanted.withEdges) startEdges();
    drawNodes();
  });
}

// A canvas without its last drawing, in the coordinates of the whole drawing.
function prepared(canvas) {
  const context = canvas.getContext("2d");
  const ratio = window.devicePixelRatio || 1;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, scroller.clientWidth, scroller.clientHeight);
  context.translate(-scroller.scrollLeft, -scroller.scrollTop);
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
  const context = prepared(canvases.edges);
  context.globalCompositeOperation = "destination-over";
  context.lineCap = "butt";
  context.globalAlpha = state.selected ? 0.1 : 0.3;
  job = { context, next: 0, end: edgesWithin(state.edgeLimit) };
  drawEdges(job);
}

function drawEdges(one) {
  if (one !== job) return;
  const { context } = one;
  let dashed = null; // whether the last edge was
  const begun = performance.now();
  let room = batch;
  const [top, bottom] = [scroller.scrollTop, scroller.scrollTop + scroller.clientHeight];
  const [left, right] = [scroller.scrollLeft, scroller.scrollLeft + scroller.clientWidth];
  for (; one.next < one.end && room > 0; one.next++) {
    const edge = edges[one.next];
    if (!shown[edge.source] || !shown[edge.target]) continue;
    const [a, b] = [nodes[edge.source], nodes[edge.target]];
    if (Math.max(a.y, b.y) < top || Math.min(a.y, b.y) > bottom) continue;
    if (Math.max(a.x, b.x) < left || Math.min(a.x, b.x) > right) continue;
    context.beginPath();
    context.moveTo(a.x, a.y);
    context.lineTo(b.x, b.y);
    const negative = edge.weight < 0;
    if (negative !== dashed) {
      dashed = negative;
      context.strokeStyle = negative ? ink.cold : ink.hot;
      context.setLineDash(negative ? [5, 3] : []);
    }
    context.lineWidth = 0.6 + 3 * Math.sqrt(edge.part);
    context.stroke();
    room -= 1;
  }
  canvases.edges.dataset.left = one.end - one.next;
  if (room > 0) return;
  requestAnimationFrame(() => {
    const took = performance.now() - begun;
    if (took > BATCH.slow) batch = Math.max(BATCH.least, Math.round(batch / 2));
    else if (took < BATCH.fast) batch = Math.min(BATCH.most, Math.round(batch * 1.5));
    drawEdges(one);
  });
}

// The edges of the selected node that join shown nodes, weakest first.
const selectedEdges = () => (state.selected === null ? []
  : [...inputs[state.selected.i], ...outputs[state.selected.i]]
    .filter((edge) => shown[edge.source] && shown[edge.target])
    .sort((a, b) => a.part - b.part));

function drawNodes() {
  const context = prepared(canvases.nodes);
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
  for (const node of new Set([hovered, state.selected, state.cursor])) {
    if (node && shown[node.i]) drawRing(context, node);
  }
  if (showsPath()) drawPath(context);
  drawAxes(context, left, top, width, height);
}

// The strongest path is drawn unless another node than its logit is selected, or part is hidden.
const showsPath = () => path.length > 0 && path.every((node) => shown[node.i])
  && (state.selected === null || state.selected === path[path.length - 1]);

function drawPath(context) {
  context.strokeStyle = ink.ink;
  context.lineWidth = 2.5;
  context.lineJoin = "round";
  context.beginPath();
  for (const [k, { x, y }] of path.entries()) {
    if (k) context.lineTo(x, y);
    else context.moveTo(x, y);
  }
  context.stroke();
  for (const node of path) drawNode(context, node);
  for (const node of path) drawName(context, node);
}

// The name of a node beside it, on the side with more room.
function drawName(context, node) {
  const beside = size.radius + 7;
  const [start, end] = [GUTTER.left, scroller.clientWidth];
  const x = node.x - scroller.scrollLeft;
  const onLeft = x - start > end - x;
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const text = fitted(context, node.label, (onLeft ? x - start : end - x) - beside - 8);
  const width = context.measureText(text).width;
  const at = onLeft ? node.x - beside - width : node.x + beside;
  context.globalAlpha = 0.85;
  context.fillStyle = ink.page;
  context.fillRect(at - 3, node.y - 8, width + 6, 16);
  context.globalAlpha = 1;
  context.fillStyle = ink.ink;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, at, node.y);
}

// A mark by kind: circle, diamond, square, triangle, cross.
function tracePath(context, kind, x, y, half) {
  const more = half + 1;
  context.beginPath();
  if (kind === "feature") context.arc(x, y, half, 0, 2 * Math.PI);
  else if (kind === "error") polygon(context, [[x, y - more], [x + more, y], [x, y + more], [x - more, y]]);
  else if (kind === "token") context.rect(x - half, y - half, 2 * half, 2 * half);
  else if (kind === "logit") polygon(context, [[x, y - more], [x + more, y + half], [x - more, y + half]]);
  else {
    context.moveTo(x - half, y);
    context.lineTo(x + half, y);
    context.moveTo(x, y - half);
    context.lineTo(x, y + half);
  }
}

function polygon(context, points) {
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
}

function drawNode(context, node) {
  const look = { kind: node.kind, selected: node === state.selected,
    grouped: groupsOf(node).length > 0, pinned: state.pinned.has(node) };
  const name = Object.values(look).join(" ");
  if (!stamps.has(name)) stamps.set(name, stamp(look));
  const half = size.radius + 5;
  context.drawImage(stamps.get(name), node.x - half, node.y - half, 2 * half, 2 * half);
}

// A mark on a small canvas, which is copied for every node that looks so.
function stamp({ kind, selected, grouped, pinned }) {
  const half = size.radius + 5;
  const ratio = Math.max(2, window.devicePixelRatio || 1);
  const canvas = el("canvas", { width: Math.ceil(2 * half * ratio), height: Math.ceil(2 * half * ratio) });
  const context = canvas.getContext("2d");
  context.setTransform(canvas.width / (2 * half), 0, 0, canvas.height / (2 * half), 0, 0);
  tracePath(context, kind, half, half, size.radius);
  context.fillStyle = selected ? ink.ink : grouped ? ink.s1 : kind === "error" ? ink.page : ink.s0;
  context.strokeStyle = kind === "bias" || selected ? ink.ink : kind === "error" ? ink.soft : ink.page;
  context.lineWidth = kind === "bias" ? 2.5 : kind === "error" ? 1.5 : 1;
  if (kind !== "bias") context.fill();
  context.stroke();
  if (pinned) {
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.5;
    context.strokeRect(1.5, 1.5, 2 * half - 3, 2 * half - 3);
  }
  if (grouped) {
    context.fillStyle = ink.page;
    context.fillRect(half - 1.5, half - 1.5, 3, 3);
  }
  return canvas;
}

// Around the node under the pointer, the selected one, and the one that the keyboard is at.
function drawRing(context, node) {
  const atCursor = node === state.cursor && scrollerHasFocus();
  if (node === state.cursor && !atCursor && node !== hovered && node !== state.selected) return;
  context.lineWidth = atCursor ? 2.5 : 1.5;
  context.strokeStyle = atCursor ? ink.link : ink.ink;
  context.beginPath();
  context.arc(node.x, node.y, size.radius + 5, 0, 2 * Math.PI);
  context.stroke();
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
