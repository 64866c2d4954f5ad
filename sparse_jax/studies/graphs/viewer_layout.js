// Where nodes are in the drawing, and which node or edge is under the pointer.

// Roomy, or dense where a graph would not fit into the frame.
const ROOMY = { spacing: 14, radius: 4.5, row: 26, column: 40 };
const DENSE = { spacing: 10, radius: 3.6, row: 18, column: 30 };
const GUTTER = { left: 52, right: 10, top: 8, bottom: 24 };
const BUCKET = 32; // pixels, of the grid that finds the node under the pointer

const frame = byId("frame");
const scroller = byId("scroller");
let size = ROOMY;
let columns = []; // { position, left, width, label }
let rows = []; // by row: { middle, height }
let extent = { width: 0, height: 0 };
let buckets = new Map();

// Places of all nodes, which stay when thresholds change.
function layOut(chosen) {
  size = chosen;
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
    const width = size.spacing * Math.ceil(1.6 * Math.sqrt(most)) + 14;
    columns.push({ position, label, width: Math.max(size.column, width) });
  }
  const wanted = columns.reduce((sum, column) => sum + column.width, 0);
  // Without the bar that scrolls down.
  const room = frame.clientWidth - 18 - GUTTER.left - GUTTER.right;
  const stretch = Math.max(1, room / wanted);
  let left = GUTTER.left;
  for (const column of columns) {
    column.left = left;
    column.width *= stretch;
    left += column.width;
  }
  extent.width = left + GUTTER.right;
  const perLine = (column) => Math.max(1, Math.floor((column.width - 8) / size.spacing));
  const columnAt = new Map(columns.map((column) => [column.position, column]));
  rows = Array.from({ length: TOP_ROW + 1 }, () => ({ height: size.row }));
  for (const [key, cell] of cells) {
    const [position, row] = key.split(" ").map(Number);
    const lines = Math.ceil(cell.length / perLine(columnAt.get(position)));
    rows[row].height = Math.max(rows[row].height, lines * size.spacing + size.row - size.spacing);
  }
  const height = rows.reduce((sum, row) => sum + row.height, 0);
  // Lower where the window is, so that the drawing is on the first screen of a telephone.
  const least = Math.max(260, Math.min(380, 0.42 * window.innerHeight));
  const spread = Math.max(1, (least - GUTTER.top - GUTTER.bottom) / height);
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
      node.x = column.left + column.width / 2 + ((k % count) - (inLine - 1) / 2) * size.spacing;
      node.y = rows[row].middle + (line - (lines - 1) / 2) * size.spacing;
      const bucket = `${Math.floor(node.x / BUCKET)} ${Math.floor(node.y / BUCKET)}`;
      if (!buckets.has(bucket)) buckets.set(bucket, []);
      buckets.get(bucket).push(node);
    });
  }
}

function nodeAt(x, y) {
  let [best, least] = [null, (size.radius + 6) ** 2];
  const [i, j] = [Math.floor(x / BUCKET), Math.floor(y / BUCKET)];
  for (let a = i - 1; a <= i + 1; a++) {
    for (let b = j - 1; b <= j + 1; b++) {
      for (const node of buckets.get(`${a} ${b}`) || []) {
        const square = (node.x - x) ** 2 + (node.y - y) ** 2;
        if (shown[node.i] && square < least) [best, least] = [node, square];
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
    const far = Math.hypot(a.x + along * dx - x, a.y + along * dy - y);
    if (far < least) [best, least] = [edge, far];
  }
  return best;
}
