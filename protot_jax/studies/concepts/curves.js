// Write gate, read gate and memory over the tokens of one text, as inline SVG (the paper's Fig. 3).

const HEIGHT = 170;
const MAX_TOKEN_LABELS = 48;
const MIN_LABEL_STEP = 12;

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The least of 1, 2, 5 times a power of ten that holds all values.
function niceTop(values) {
  const most = Math.max(...values);
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((m) => m * power).find((end) => end >= most * (1 - 1e-9));
}

// A prototype's correlation of reading with writing at each lag, as bars from zero.
function lagBars(p) {
  const { lags } = report.lag;
  const values = p.cross_correlation.filter((value) => value !== null);
  if (values.length === 0) return "";
  const [step, tall] = [22, 70];
  const [high, low] = [Math.max(0, ...values), Math.min(0, ...values)];
  const y = (value) => 6 + (tall * (high - value)) / (high - low || 1);
  const marks = lags.flatMap((lag, i) => {
    const value = p.cross_correlation[i];
    const name = svg("text", {
      class: "tick", x: (i + 0.5) * step, y: tall + 24, "text-anchor": "middle",
    }, whole(lag));
    if (value === null) return [name];
    return [name, svg("rect", {
      class: lag === p.lag ? "bar s1" : "bar s0",
      x: i * step + 2,
      y: Math.min(y(value), y(0)),
      width: step - 4,
      height: Math.abs(y(value) - y(0)),
    }, svg("title", {}, `lag ${whole(lag)}: ${number(value)}`))];
  });
  const [width, height] = [lags.length * step, tall + 30];
  const readings = lags
    .map((lag, i) => `${whole(lag)}: ${number(p.cross_correlation[i])}`).join(", ");
  return el("figure", { class: "lags" },
    el("figcaption", {}, "Correlation of its read gate with its write gate, by lag in tokens "
      + "(below 0: reading comes before writing)"),
    svg("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": readings,
    }, svg("line", { class: "axis", x1: 0, x2: width, y1: y(0), y2: y(0) }), ...marks));
}

function drawCurves(box, topText) {
  const { tokens } = report.texts[topText.text];
  const width = Math.max(240, box.clientWidth);
  const [left, right, top] = [44, 10, 10];
  const step = (width - left - right) / Math.max(tokens.length, 1);
  const named = tokens.length <= MAX_TOKEN_LABELS && step >= MIN_LABEL_STEP;
  const end = niceTop(KINDS.flatMap(([kind]) => topText[kind]));
  const x = (i) => left + (i + 0.5) * step;
  const y = (value) => top + HEIGHT * (1 - value / end);
  const base = y(0);
  const marks = [0, end / 2, end].flatMap((value) => [
    svg("line", {
      class: value ? "gridline" : "axis", x1: left, x2: width - right, y1: y(value), y2: y(value),
    }),
    svg("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" },
      String(Number(value.toPrecision(3)))),
  ]);
  const stride = named ? 1 : Math.ceil(50 / step);
  for (let i = 0; i < tokens.length; i += stride) {
    const text = visible(tokens[i].trim()) || visible(tokens[i]);
    const name = text.length > 12 ? `${text.slice(0, 11)}…` : text;
    marks.push(named
      ? svg("text", { class: "tick turned", x: 0, y: 0, "text-anchor": "end",
        transform: `translate(${x(i) + 4} ${base + 8}) rotate(-90)` }, name)
      : svg("text", { class: "tick", x: x(i), y: base + 18, "text-anchor": "middle" }, String(i)));
  }
  for (const [kind] of KINDS) {
    const points = topText[kind].map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    marks.push(svg("polyline", { class: `line curve-${kind}`, points: points.join(" ") }));
  }
  const cursor = svg("line", { class: "rule", y1: top, y2: base, visibility: "hidden" });
  const depth = named ? 92 : 26;
  const picture = svg("svg", {
    width, height: base + depth, viewBox: `0 0 ${width} ${base + depth}`, role: "img", tabindex: 0,
    "aria-label": "Write gate, read gate and memory over the tokens; left and right arrow keys "
      + "read out one token at a time",
  }, ...marks, cursor);
  const readout = el("p", { class: "small readout", role: "status" },
    "Point at a token, or use the arrow keys, to read its values.");
  let at = -1;
  const point = (i) => {
    at = Math.max(0, Math.min(tokens.length - 1, i));
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    const values = KINDS.map(([kind, name]) => `${name} ${number(topText[kind][at])}`);
    readout.textContent = `Token ${at}, ${visible(tokens[at])}: ${values.join(" · ")}`;
  };
  if (tokens.length) {
    picture.addEventListener("pointermove", (event) => {
      point(Math.floor((event.clientX - picture.getBoundingClientRect().left - left) / step));
    });
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      point(at + move);
    });
  }
  const keys = KINDS.map(([kind, name]) => el("span", { class: "key" },
    svg("svg", { class: "swatch", viewBox: "0 0 26 14", "aria-hidden": "true" },
      svg("line", { class: `line curve-${kind}`, x1: 1, x2: 25, y1: 7, y2: 7 })), name));
  box.replaceChildren(el("div", { class: "legend" }, ...keys), picture,
    el("p", { class: "x-label" }, named ? "token" : "token (position in the text)"), readout);
  box.redraw = () => drawCurves(box, topText);
}

function redrawCurves() {
  for (const box of document.querySelectorAll(".curves")) {
    if (box.firstChild) box.redraw();
  }
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  redrawCurves();
});

start();
