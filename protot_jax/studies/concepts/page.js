// The explorer of the concept report: filters, map and list of prototypes, and which one is open.
//
// All data is `report`: the summary, embedded in the page. Its strings are set as text, never as
// markup. The hash of the address, "#layer=3&prototype=7", names the open prototype, so that it can
// be linked to.

const report = JSON.parse(document.getElementById("report-data").textContent);
const filters = byId("filters");

// A judge's score, which may be a fraction.
const score = (value) => (Number.isInteger(value) ? whole(value) : number(value));

// Mutual information less its value for shuffled tokens, and the two numbers behind it.
const aboveChance = (gate) => (gate.mutual_information === null ? null
  : gate.mutual_information - gate.mutual_information_by_chance);
const chanceDetail = (gate) => (gate.mutual_information === null ? ""
  : ` (${number(gate.mutual_information)}, by chance ${number(gate.mutual_information_by_chance)})`);

// In tokens; infinite where the file has null, for the decay has rounded to 1.
const life = (p) => p.half_life ?? Infinity;

const MEASURES = [
  ["half-life (tokens, log scale)", life, (x) => Math.log(Math.max(x, 1e-6)),
    (x) => (x === Infinity ? "∞" : number(x))],
  ["repetition of its top tokens", (p) => p.repetition],
  ["write: peak over mean", (p) => p.write.peak_over_mean],
  ["write: MI above chance (nats)", (p) => aboveChance(p.write),
    (x) => x, number, (p) => chanceDetail(p.write)],
  ["write: mean gate", (p) => p.write.mean],
  ["write: largest gate", (p) => p.write.max],
  ["write: share of tokens where it is the top prototype", (p) => p.write.top_1],
  ["write: share of tokens where it is active", (p) => p.write.active],
  ["read: peak over mean", (p) => p.read.peak_over_mean],
  ["read: MI above chance (nats)", (p) => aboveChance(p.read),
    (x) => x, number, (p) => chanceDetail(p.read)],
  ["read: mean gate", (p) => p.read.mean],
  ["lag of reading behind writing (tokens)", (p) => p.lag, (x) => x, whole],
  ["label: disentanglement", (p) => p.label && p.label.disentanglement, (x) => x, score],
  ["label: coverage", (p) => p.label && p.label.coverage, (x) => x, score],
  ["label: number of themes", (p) => p.label && p.label.themes, (x) => x, whole],
].map(([name, value, scale = (x) => x, show = number, detail = () => ""]) =>
  ({ name, value, scale, show, detail }))
  .filter(({ value }) => report.prototypes.some((p) => value(p) !== null));

const MAX_LISTED = 100;

// The texts of a prototype that the search looks through, each with the name of its place.
const searchTexts = new Map(report.prototypes.map((p) => [p, [
  ["theme", p.label ? `${p.label.theme} ${p.label.explanation}` : ""],
  ["top token", p.top_tokens.map((t) => t.token).join(" ")],
  ["text", p.top_texts.map((s) => report.texts[s.text].words.join("")).join("\n")],
].map(([place, text]) => [place, text.toLowerCase()])]));

const cells = new Map();
let opened = null;

const title = (p) => `Layer ${p.layer}, prototype ${p.prototype}`;
const isDead = (p) => p.write.active === 0;

function halfLife(p) {
  return life(p) === Infinity ? "infinite half-life" : `half-life ${number(p.half_life)} tokens`;
}

// Where the query stands in a prototype: "theme", "top token", "text", or null.
function matchPlace(p, query) {
  const hit = searchTexts.get(p).find(([, text]) => text.includes(query));
  return hit ? hit[0] : null;
}

function matches(p) {
  const field = filters.elements;
  const query = field.query.value.trim().toLowerCase();
  const [low, high] = [field.low.valueAsNumber, field.high.valueAsNumber];
  return (field.layer.value === "" || p.layer === Number(field.layer.value))
    && !(life(p) < low) && !(life(p) > high)
    && !(field.labelled.checked && !p.label)
    && !(field.alive.checked && isDead(p))
    && (query === "" || matchPlace(p, query) !== null);
}

// The chosen measure, with its range over the finite values of all prototypes and the strength of
// colour of a value, which is full for an infinite one.
function measure() {
  const { name, value, scale, show, detail } = MEASURES[Number(byId("measure").value)];
  const values = report.prototypes.map(value).filter((x) => x !== null);
  const finite = values.filter(Number.isFinite);
  const range = finite.length ? finite : values;
  const [low, high] = [Math.min(...range), Math.max(...range)];
  const span = scale(high) - scale(low);
  const strength = (x) => (span > 0 && x < Infinity ? (scale(x) - scale(low)) / span : 1);
  const ends = [show(low), [...new Set([show(high), show(Math.max(...values))])].join(", ")];
  return { name, value, show, detail, ends, strength };
}

function showMap(matching) {
  const { name, value, show, detail, ends, strength } = measure();
  for (const [p, cell] of cells) {
    const x = value(p);
    cell.classList.toggle("unmatched", !matching.has(p));
    cell.classList.toggle("missing", x === null);
    cell.style.setProperty("--strength", x === null ? 0 : strength(x));
    const text = `${title(p)}: ${name} ${show(x)}${detail(p)}${isDead(p) ? ", dead" : ""}`;
    cell.setAttribute("aria-label", text);
    cell.setAttribute("title", text);
  }
  byId("map-legend").replaceChildren(
    el("span", { class: "key" }, ends[0], el("span", { class: "ramp mapped" }), ends[1]),
    el("span", { class: "key" }, el("span", { class: "ramp missing" }), "no value"),
    el("span", { class: "key" }, "faded: excluded by the filters"),
  );
}

function describe(p) {
  if (p.label) return p.label.theme;
  if (p.top_tokens.length) return p.top_tokens.slice(0, 5).map((t) => t.token.trim()).join(" · ");
  return "no top tokens";
}

function showList(matching) {
  const { value, show } = measure();
  const query = filters.elements.query.value.trim().toLowerCase();
  const rank = (p) => (value(p) === null ? -Infinity : value(p));
  const order = [...matching].sort((a, b) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
  byId("matches").replaceChildren(...order.slice(0, MAX_LISTED).map((p) => el("li", {},
    el("a", { href: hashOf(p), "aria-current": p === opened ? "true" : null },
      el("b", {}, `L${p.layer} P${p.prototype}`),
      el("span", { class: "value" }, show(value(p))),
      el("span", { class: "about" }, el("bdi", {}, describe(p)),
        query ? el("i", {}, ` in a ${matchPlace(p, query)}`) : "")))));
  const rest = order.length - MAX_LISTED;
  byId("more").textContent = order.length === 0
    ? "No prototype matches. Use a shorter search text, or clear the filters."
    : rest > 0 ? `and ${whole(rest)} more; narrow the search to see them.` : "";
}

function refresh() {
  const matching = new Set(report.prototypes.filter(matches));
  const all = report.prototypes.length;
  byId("count").textContent = matching.size === all
    ? `All ${whole(all)} prototypes` : `${whole(matching.size)} of ${whole(all)} prototypes match`;
  showMap(matching);
  showList(matching);
}

const hashOf = (p) => `#layer=${p.layer}&prototype=${p.prototype}`;

// Opens what the hash names. Other hashes are links inside the page and change nothing.
function openFromHash() {
  const named = /^#layer=(\d+)&prototype=(\d+)$/.exec(location.hash);
  if (!named) return;
  const [layer, prototype] = [Number(named[1]), Number(named[2])];
  const p = report.prototypes.find((one) => one.layer === layer && one.prototype === prototype);
  if (p) open(p);
  else {
    byId("opened").replaceChildren(el("p", { class: "absent" },
      `This report has no layer ${layer} with a prototype ${prototype}; choose one in the map.`));
  }
}

function open(p) {
  opened = p;
  for (const [one, cell] of cells) {
    cell.setAttribute("aria-pressed", one === p);
    cell.tabIndex = one === p ? 0 : -1;
  }
  for (const link of byId("matches").querySelectorAll("a")) {
    const current = link.getAttribute("href") === hashOf(p);
    if (current) {
      link.setAttribute("aria-current", "true");
      // Scrolls the list and not the page.
      const list = link.closest("nav");
      if (!inView(link, list)) list.scrollTop = link.offsetTop - list.offsetTop - 60;
    } else link.removeAttribute("aria-current");
  }
  showPrototype(p);
}

function inView(link, list) {
  const [inner, outer] = [link.getBoundingClientRect(), list.getBoundingClientRect()];
  return inner.top >= outer.top && inner.bottom <= outer.bottom;
}

// Arrow keys move in the map, one prototype or one layer at a time.
function moveInMap(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const at = [...cells.entries()].find(([, cell]) => cell === event.target);
  if (!at || !(event.key in step)) return;
  const [layers, along] = step[event.key];
  const goal = report.prototypes.find((p) => p.layer === at[0].layer + layers
    && p.prototype === at[0].prototype + along);
  event.preventDefault();
  if (goal) cells.get(goal).focus();
}

function buildMap() {
  for (const { layer } of report.layers) {
    const group = el("div", { class: "map-cells" });
    for (const p of report.prototypes.filter((one) => one.layer === layer)) {
      const go = () => { location.hash = hashOf(p); };
      const cell = el("button", { type: "button", on: { click: go } }, String(p.prototype));
      cell.tabIndex = -1;
      cells.set(p, cell);
      group.append(cell);
    }
    const name = el("span", { class: "map-layer" }, `L${layer}`);
    byId("map").append(el("div", { class: "map-row" }, name, group));
  }
  byId("map").addEventListener("keydown", moveInMap);
}

function start() {
  byId("explorer").hidden = false;
  if (report.prototypes.length === 0) {
    const message = el("p", { class: "absent" }, "This report holds no prototype.");
    byId("explorer").replaceChildren(message);
    return;
  }
  for (const { layer } of report.layers) {
    filters.elements.layer.append(el("option", { value: layer }, String(layer)));
  }
  filters.elements.labelled.disabled = report.prototypes.every((p) => !p.label);
  MEASURES.forEach(({ name }, i) => byId("measure").append(el("option", { value: i }, name)));
  buildMap();
  filters.addEventListener("input", refresh);
  filters.addEventListener("submit", (event) => event.preventDefault());
  // The fields are cleared after the event.
  filters.addEventListener("reset", () => setTimeout(refresh));
  byId("measure").addEventListener("input", refresh);
  window.addEventListener("hashchange", openFromHash);
  refresh();
  open(report.prototypes.find((p) => !isDead(p)) || report.prototypes[0]);
  openFromHash();
}
