// Pinned nodes, supernodes, and the graph that they make.

const BOX = { width: 150, height: 40, across: 26, down: 46 };

function togglePin(node) {
  if (!state.pinned.delete(node)) state.pinned.add(node);
  changed();
  say(node);
}

// A label that no supernode has.
function freeLabel(wanted) {
  const taken = new Set(state.groups.map((group) => group.label));
  let label = wanted;
  for (let k = 2; taken.has(label); k++) label = `${wanted} (${k})`;
  return label;
}

function addGroup(label, members) {
  state.groups.push({ label: freeLabel(label), members: new Set(members) });
  changed();
}

const nodeButton = (node) => el("button", { type: "button", class: "node",
  on: { click: () => select(node) } }, el("bdi", {}, shortName(node)), el("small", {}, place(node)));

function removal(name, remove) {
  return el("button", { type: "button", class: "remove", "aria-label": name, title: name,
    on: { click: remove } }, "×");
}

function showGroups() {
  const pins = [...state.pinned].map((node) => el("li", {}, nodeButton(node),
    removal(`Unpin ${fullName(node)}`, () => togglePin(node))));
  byId("pins").replaceChildren(...(pins.length ? pins
    : [el("li", { class: "absent" }, "None. Press P on a node, or Pin in the panel.")]));
  const groups = state.groups.map(groupItem);
  byId("supernodes").replaceChildren(...(groups.length ? groups
    : [el("li", { class: "absent" }, "None yet.")]));
  const open = openProposals();
  byId("proposed").hidden = data.proposals.length === 0;
  byId("proposed").querySelector("summary").textContent = open.length
    ? `${counted(open.length, "proposed supernode")}` : "All proposed supernodes are in use";
  byId("use-all").disabled = open.length === 0;
  byId("proposals").replaceChildren(...open.map(([label, ...ids]) => el("li", {},
    el("span", {}, el("bdi", {}, label), el("small", {}, ` ${counted(ids.length, "feature")}`)),
    el("button", { type: "button", on: { click: () => addGroup(label, membersOf(ids)) } }, "Use"))));
  showSubgraph();
}

const membersOf = (ids) => ids.map((id) => nodes[indexOf.get(id)]);

// Proposals that are not a supernode yet.
const openProposals = () => data.proposals.filter(([, ...ids]) => !state.groups.some((group) =>
  group.members.size === ids.length && membersOf(ids).every((node) => group.members.has(node))));

function useAll() {
  for (const [label, ...ids] of openProposals()) {
    state.groups.push({ label: freeLabel(label), members: new Set(membersOf(ids)) });
  }
  changed();
}

function groupItem(group) {
  const name = el("input", { value: group.label, "aria-label": "Name of the supernode", maxlength: 80 });
  name.addEventListener("change", () => {
    const wanted = name.value.trim();
    group.label = "";
    group.label = freeLabel(wanted || "supernode");
    changed();
  });
  const add = state.selected && !group.members.has(state.selected)
    ? el("button", { type: "button", class: "add", on: { click: () => {
      group.members.add(state.selected);
      changed();
    } } }, "Add the selected node") : "";
  return el("li", { class: "group" },
    el("div", { class: "group-head" }, name,
      removal(`Delete supernode ${group.label}`, () => {
        state.groups.splice(state.groups.indexOf(group), 1);
        changed();
      })),
    el("ul", {}, ...[...group.members].map((node) => el("li", {}, nodeButton(node),
      removal(`Remove ${fullName(node)} from ${group.label}`, () => {
        group.members.delete(node);
        changed();
      })))),
    ...outcomesOf(group),
    add);
}

// Nodes of the smaller graph, and its edges: sums of the weights between members.
function summary() {
  const grouped = new Set(state.groups.flatMap((group) => [...group.members]));
  const parts = [
    ...state.groups.filter((group) => group.members.size)
      .map((group) => ({ label: group.label, members: [...group.members], group })),
    ...[...state.pinned].filter((node) => !grouped.has(node))
      .map((node) => ({ label: shortName(node), members: [node], node })),
  ];
  const average = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
  parts.forEach((part, i) => {
    part.i = i;
    part.row = average(part.members.map((node) => node.row));
    part.position = average(part.members.map((node) => node.position));
  });
  const partsOf = nodes.map(() => []);
  for (const part of parts) for (const node of part.members) partsOf[node.i].push(part);
  const sums = new Map();
  for (const edge of edges) {
    for (const source of partsOf[edge.source]) {
      for (const target of partsOf[edge.target]) {
        if (source === target) continue;
        const key = `${source.i} ${target.i}`;
        if (!sums.has(key)) sums.set(key, { source, target, weight: 0, count: 0 });
        const sum = sums.get(key);
        sum.weight += edge.weight;
        sum.count += 1;
      }
    }
  }
  return { parts, sums: [...sums.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)) };
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function showSubgraph() {
  const { parts, sums } = summary();
  if (parts.length < 2) {
    byId("subgraph").replaceChildren(el("p", { class: "absent" },
      "Pin two nodes, or make supernodes, to see the edges between them."));
    return;
  }
  byId("subgraph").replaceChildren(drawSubgraph(parts, sums), sums.length
    ? el("div", { class: "scroll", tabindex: "0" }, el("table", {},
      el("caption", {}, "Summed weights"),
      el("thead", {}, el("tr", {}, ...["From", "To", "Sum", "Edges"].map((name, i) =>
        el("th", { scope: "col", class: i > 1 ? "right" : "left" }, name)))),
      el("tbody", {}, ...sums.map((sum) => el("tr", {}, el("td", {}, sum.source.label),
        el("td", {}, sum.target.label), el("td", { class: "right" }, number(sum.weight)),
        el("td", { class: "right" }, whole(sum.count)))))))
    : el("p", { class: "absent" }, "No edge of this file joins them."));
}

// Where an edge leaves a box and enters another: above and below, or at the sides.
function ends(source, target) {
  const [a, b] = [source.x + BOX.width / 2, target.x + BOX.width / 2];
  if (source.y > target.y) return [a, source.y, b, target.y + BOX.height];
  if (source.y < target.y) return [a, source.y + BOX.height, b, target.y];
  const [y, right] = [source.y + BOX.height / 2, a < b];
  return [source.x + (right ? BOX.width : 0), y, target.x + (right ? 0 : BOX.width), y];
}

function drawSubgraph(parts, sums) {
  const levels = [...new Set(parts.map((part) => Math.round(part.row)))].sort((a, b) => b - a);
  let width = 0;
  levels.forEach((level, i) => {
    const line = parts.filter((part) => Math.round(part.row) === level)
      .sort((a, b) => a.position - b.position || a.i - b.i);
    line.forEach((part, k) => {
      part.x = BOX.across / 2 + k * (BOX.width + BOX.across);
      part.y = 4 + i * (BOX.height + BOX.down);
      part.inLine = line.length;
    });
    width = Math.max(width, line.length * (BOX.width + BOX.across));
  });
  for (const part of parts) part.x += (width - part.inLine * (BOX.width + BOX.across)) / 2;
  const height = levels.length * (BOX.height + BOX.down) - BOX.down + 8;
  const most = Math.max(...sums.map((sum) => Math.abs(sum.weight)), 1e-30);
  const lines = [...sums].reverse().map(({ source, target, weight, count }) => {
    const [x1, y1, x2, y2] = ends(source, target);
    const far = Math.hypot(x2 - x1, y2 - y1) || 1;
    const [dx, dy] = [(x2 - x1) / far, (y2 - y1) / far];
    const [bx, by] = [x2 - 9 * dx, y2 - 9 * dy];
    return svg("g", { class: weight < 0 ? "cold" : "hot" },
      svg("title", {}, `${source.label} → ${target.label}: ${number(weight)}, ${counted(count, "edge")}`),
      svg("line", { x1, y1, x2: bx, y2: by,
        "stroke-width": (1 + (6 * Math.abs(weight)) / most).toFixed(2) }),
      svg("path", { d: `M${x2} ${y2}L${bx - 5 * dy} ${by + 5 * dx}L${bx + 5 * dy} ${by - 5 * dx}Z` }));
  });
  const boxes = parts.map((part) => {
    const short = part.label.length > 20 ? `${part.label.slice(0, 19)}…` : part.label;
    const detail = part.group ? counted(part.members.length, "node")
      : place(part.node).trim() || part.node.kind;
    const box = svg("g", { class: part.group ? "box group" : "box" },
      svg("title", {}, part.label),
      svg("rect", { x: part.x, y: part.y, width: BOX.width, height: BOX.height, rx: part.group ? 8 : 0 }),
      svg("text", { x: part.x + BOX.width / 2, y: part.y + 17 }, short),
      svg("text", { x: part.x + BOX.width / 2, y: part.y + 33, class: "tick" },
        detail.length > 22 ? `${detail.slice(0, 21)}…` : detail));
    box.addEventListener("click", () => select(part.members[0]));
    return box;
  });
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": "Pinned nodes and supernodes; the table below has their edges" }, ...lines, ...boxes);
  return el("div", { class: "scroll", tabindex: "0" }, drawing);
}

function startGroups() {
  byId("use-all").addEventListener("click", useAll);
  byId("new-supernode").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = event.target.elements.label;
    addGroup(field.value.trim() || "supernode", state.selected ? [state.selected] : []);
    field.value = "";
  });
}
