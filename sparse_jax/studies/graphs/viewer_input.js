// Pointer and keyboard in the drawing.

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
    redraw(false);
  }
  const tip = byId("tip");
  tip.hidden = node === null;
  if (node === null) return;
  const activation = node.activation === null ? "" : `, activation ${number(node.activation)}`;
  tip.textContent = `${fullName(node)}${activation}`;
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
  redraw(false);
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
  scroller.addEventListener("scroll", () => redraw(), { passive: true });
  scroller.addEventListener("pointermove", point);
  scroller.addEventListener("pointerleave", () => {
    hovered = null;
    byId("tip").hidden = true;
    redraw(false);
  });
  scroller.addEventListener("click", click);
  scroller.addEventListener("keydown", pressKey);
  scroller.addEventListener("focus", () => {
    if (!state.cursor && state.selected) state.cursor = state.selected;
    redraw(false);
  });
  scroller.addEventListener("blur", () => redraw(false));
  let width = 0;
  new ResizeObserver(() => {
    if (frame.clientWidth !== width) {
      width = frame.clientWidth;
      resize();
    }
  }).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
}
