// The open prototype: badge, label, statistics, top tokens, and its texts with coloured words.

const KINDS = [
  ["write", "write gate"],
  ["read", "read gate"],
  ["memory", "memory"],
];

// Kept while the reader goes from one prototype to the next.
const view = { kind: "write", absolute: false };

const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

// The value of a word is the mean over its tokens.
function byWord(shown, kind) {
  const { words, word_of: wordOf } = twin.texts[shown.text];
  return words.map((_, word) => {
    const values = shown[kind].filter((_, token) => wordOf[token] === word);
    return values.length ? mean(values) : null;
  });
}

function showPrototype(p) {
  byId("tip").hidden = true;
  byId("opened").replaceChildren(
    make("div", { class: "title" }, make("h3", {}, title(p)),
      make("span", { class: "badge" }, halfLife(p)),
      isDead(p) ? make("span", { class: "badge dead" }, "dead") : ""),
    label(p),
    make("div", { class: "beside" }, statistics(p), topTokens(p)),
    make("h4", {}, `Texts that it writes most, by ${twin.settings.rank_by} write gate`),
    ...topTexts(p),
    make("p", { class: "small" }, "The edit that closes it to writing: ", make("code", {},
      `protot_jax.edit(layer=${p.layer}, prototype=${p.prototype}, mode="mask_write")`)),
  );
  // A drawing has the width of its place in the page, so it comes after.
  const first = byId("opened").querySelector(".texts button");
  if (first) first.click();
}

function label(p) {
  if (!p.label) {
    return make("p", { class: "absent" }, twin.settings.judge === "null"
      ? "No label: this report was made without a judge."
      : "No label: the judge gave no answer that could be read.");
  }
  const { theme, explanation, disentanglement, coverage, themes } = p.label;
  const scores = [
    ["disentanglement", disentanglement, " of 10"],
    ["coverage", coverage, " of 10"],
    ["themes", themes, ""],
  ];
  return make("div", { class: "label" },
    make("p", {}, make("strong", {}, make("bdi", {}, theme))),
    make("p", { class: "scores" }, ...scores.map(([name, value, of]) =>
      make("span", {}, `${name} `, make("b", {}, score(value)), of))),
    make("p", {}, make("bdi", {}, explanation)));
}

function tableOf(caption, heads, rows) {
  const side = (i) => (i ? "right" : "left");
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {},
      ...heads.map((head, i) => make("th", { scope: "col", class: side(i) }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, i) =>
      (i ? make("td", { class: "right" }, value)
        : make("th", { scope: "row", class: "left" }, make("bdi", {}, value)))))))));
}

function statistics(p) {
  const row = (name, field) => [name, number(p.write[field]), number(p.read[field])];
  const shared = p.layer === 0 && twin.model.shared_routing;
  const lag = shared ? "It reads with its write gate (shared routing)."
    : p.lag === null ? "Reading and writing do not vary together."
    : p.lag === 0 ? "Reading peaks with writing."
    : `Reading peaks ${whole(Math.abs(p.lag))} ${Math.abs(p.lag) === 1 ? "token" : "tokens"} `
      + `${p.lag < 0 ? "before" : "after"} writing.`;
  return make("div", {}, tableOf("Its gates over all analysed tokens", ["", "write", "read"], [
    row("mean", "mean"),
    row("largest", "max"),
    row("peak over mean", "peak_over_mean"),
    row("mutual information, nats", "mutual_information"),
    row("the same by chance", "mutual_information_by_chance"),
    row("share where it leads", "top_1"),
    row("share where active", "active"),
  ]),
  make("p", { class: "small" }, `Decay ${number(p.decay)} a token. ${lag} `
    + `Repetition of its top tokens ${number(p.repetition)}.`),
  lagBars(p));
}

// A token as it can be seen: its spaces and line ends as signs.
const visible = (token) => token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥");

function topTokens(p) {
  if (p.top_tokens.length === 0) {
    return make("p", { class: "absent" }, "It wrote nowhere in the analysed texts: no top tokens.");
  }
  return make("div", {}, tableOf("Tokens that it writes most", ["token", "mean", "sum", "count"],
    p.top_tokens.map((t) => [visible(t.token), number(t.mean), number(t.sum), whole(t.count)])));
}

function choice(name, options, chosen, onChange) {
  return make("fieldset", { class: "choice" }, make("legend", {}, name),
    ...options.map(([value, text]) => make("label", {}, make("input", {
      type: "radio", name, value, checked: value === chosen, on: { input: () => onChange(value) },
    }), ` ${text}`)));
}

function topTexts(p) {
  if (p.top_texts.length === 0) {
    return [make("p", { class: "absent" }, "It wrote nowhere in the analysed texts: no texts.")];
  }
  const list = make("ol", { class: "texts" });
  const key = make("div", { class: "legend" });
  const items = p.top_texts.map(textItem);
  list.append(...items.map((item) => item.element));
  const paint = () => {
    for (const [kind] of KINDS) list.classList.toggle(`tint-${kind}`, kind === view.kind);
    for (const item of items) item.paint();
    const ends = view.absolute ? ["0", "1"] : ["lowest of the text", "highest"];
    key.className = `legend tint-${view.kind}`;
    key.replaceChildren(
      make("span", { class: "key" }, ends[0], make("span", { class: "ramp tinted" }), ends[1]));
  };
  paint();
  return [
    make("div", { class: "choices" },
      choice("Colour words by", KINDS, view.kind, (kind) => { view.kind = kind; paint(); }),
      choice("Scale", [["own", "each text its own"], ["absolute", "0 to 1"]],
        view.absolute ? "absolute" : "own",
        (scale) => { view.absolute = scale === "absolute"; paint(); })),
    key, list,
  ];
}

function textItem(shown) {
  const text = twin.texts[shown.text];
  const values = Object.fromEntries(KINDS.map(([kind]) => [kind, byWord(shown, kind)]));
  const spans = text.words.map((word, i) => {
    const span = make("span", { class: "word" }, word.trimStart().replace(/\n/g, "↵\n"));
    span.tabIndex = i === 0 ? 0 : -1;
    const told = KINDS.map(([kind]) => `${kind} ${number(values[kind][i])}`).join(" · ");
    span.dataset.told = `${visible(word.trim())}: ${told}`;
    return span;
  });
  // The space before a word takes no colour.
  const run = text.words.flatMap((word, i) => {
    const space = word.slice(0, word.length - word.trimStart().length);
    return [space.replace(/\n/g, "↵\n"), spans[i]];
  });
  const line = make("p", { class: "words-line", role: "group",
    "aria-label": "Words; left and right arrow keys move between them", on: {
      pointerover: (event) => tell(event.target), pointerout: hush,
      focusin: (event) => tell(event.target), focusout: hush,
      keydown: (event) => moveInText(event, spans),
    } }, ...run);
  const plot = make("div", { class: "curves" });
  const button = make("button", { type: "button", "aria-expanded": "false" }, "Curves");
  button.addEventListener("click", () => {
    const shows = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", !shows);
    if (shows) plot.replaceChildren();
    else drawCurves(plot, shown);
  });
  const element = make("li", {},
    make("p", { class: "small" }, `mean ${number(shown.mean)} · sum ${number(shown.sum)} · `
      + `perplexity ${number(text.perplexity)} · document ${whole(text.document)} `, button),
    line, plot);
  const paint = () => {
    const known = values[view.kind].filter((x) => x !== null);
    const [low, high] = view.absolute ? [0, 1] : [Math.min(...known), Math.max(...known)];
    spans.forEach((span, i) => {
      const x = values[view.kind][i];
      const strength = x === null || high === low ? 0 : (x - low) / (high - low);
      span.style.setProperty("--strength", strength);
    });
  };
  return { element, paint };
}

// One word of a text is in the order of the tab key; the arrow keys choose which.
function moveInText(event, spans) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") hush();
  const goal = step && spans[spans.indexOf(event.target) + step];
  if (!goal) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
}

function tell(span) {
  if (!span.dataset || !span.dataset.told) return;
  const tip = byId("tip");
  tip.textContent = span.dataset.told;
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  // A word that is broken over two lines has two boxes; the first is where it begins.
  const place = span.getClientRects()[0];
  const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(place.left, most))}px`;
  const above = place.top - tip.offsetHeight - 6;
  tip.style.top = `${above < 0 ? place.bottom + 6 : above}px`;
}

function hush() {
  byId("tip").hidden = true;
}
