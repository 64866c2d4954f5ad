// The open prototype: badge, label, statistics, top tokens, and its texts with coloured words.

const KINDS = [
  ["write", "write gate"],
  ["read", "read gate"],
  ["memory", "memory"],
];

// Kept when another prototype is opened.
const view = { kind: "write", absolute: false };

const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

// The value of a word is the mean over its tokens.
function byWord(topText, kind) {
  const { words, word_of: wordOf } = report.texts[topText.text];
  return words.map((_, word) => {
    const values = topText[kind].filter((_, token) => wordOf[token] === word);
    return values.length ? mean(values) : null;
  });
}

function showPrototype(p) {
  byId("tip").hidden = true;
  byId("opened").replaceChildren(
    el("div", { class: "title" }, el("h3", {}, title(p)),
      el("span", { class: "badge" }, halfLife(p)),
      isDead(p) ? el("span", { class: "badge dead" }, "dead") : ""),
    label(p),
    el("div", { class: "columns" }, statistics(p), topTokens(p)),
    ablation(p),
    el("h4", {}, `Texts with the highest ${report.settings.rank_by} write gate`),
    ...topTexts(p),
    el("p", { class: "small" }, "The edit that leaves it out: ", el("code", {},
      `protot_jax.edit(layer=${p.layer}, prototype=${p.prototype}, mode="zero_read")`)),
  );
  // Curves take the width of their place, so they are drawn once it is in the page.
  const first = byId("opened").querySelector(".texts button");
  if (first) first.click();
}

function label(p) {
  if (!p.label) {
    return el("p", { class: "absent" }, report.settings.judge === "null"
      ? "No label: this report was made without a judge."
      : "No label: the judge gave no answer that could be read.");
  }
  const { theme, explanation, disentanglement, coverage, themes } = p.label;
  const scores = [
    ["disentanglement", disentanglement, " of 10"],
    ["coverage", coverage, " of 10"],
    ["themes", themes, ""],
  ];
  return el("div", { class: "label" },
    el("p", {}, el("strong", {}, el("bdi", {}, theme))),
    el("p", { class: "scores" }, ...scores.map(([name, value, of]) =>
      el("span", {}, `${name} `, el("b", {}, score(value)), of))),
    el("p", {}, el("bdi", {}, explanation)));
}

function tableOf(caption, heads, rows) {
  const side = (i) => (i ? "right" : "left");
  return el("div", { class: "scroll", tabindex: 0 }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {},
      ...heads.map((head, i) => el("th", { scope: "col", class: side(i) }, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, i) =>
      (i ? el("td", { class: "right" }, value)
        : el("th", { scope: "row", class: "left" }, el("bdi", {}, value)))))))));
}

function statistics(p) {
  const row = (name, field) => [name, number(p.write[field]), number(p.read[field])];
  const shared = p.layer === 0 && report.model.shared_routing;
  const lag = shared ? "It reads with its write gate (shared routing)."
    : p.lag === null ? "A gate never varies within a text, so reading has no lag."
    : p.lag === 0 ? "Reading peaks at the same token as writing."
    : `Reading peaks ${whole(Math.abs(p.lag))} ${Math.abs(p.lag) === 1 ? "token" : "tokens"} `
      + `${p.lag < 0 ? "before" : "after"} writing.`;
  return el("div", {}, tableOf("Its gates over all analysed tokens", ["", "write", "read"], [
    row("mean", "mean"),
    row("largest", "max"),
    row("peak over mean", "peak_over_mean"),
    row("mutual information, nats", "mutual_information"),
    row("the same by chance", "mutual_information_by_chance"),
    row("share of tokens as top prototype", "top_1"),
    row("share of tokens where active", "active"),
  ]),
  el("p", { class: "small" }, `Decay ${number(p.decay)} per token. ${lag} `
    + `Repetition of its top tokens ${number(p.repetition)}.`),
  lagBars(p));
}

// A token with its spaces, line ends and tabs as visible characters.
const visible = (token) => token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥");

function topTokens(p) {
  if (p.top_tokens.length === 0) {
    return el("p", { class: "absent" }, "It wrote nowhere in the analysed texts: no top tokens.");
  }
  const heads = ["token", "mean", "sum", "count"];
  return el("div", {}, tableOf("Tokens with the highest write gate", heads,
    p.top_tokens.map((t) => [visible(t.token), number(t.mean), number(t.sum), whole(t.count)])));
}

function choice(name, options, chosen, onChange) {
  return el("fieldset", { class: "choice" }, el("legend", {}, name),
    ...options.map(([value, text]) => el("label", {}, el("input", {
      type: "radio", name, value, checked: value === chosen, on: { input: () => onChange(value) },
    }), ` ${text}`)));
}

function topTexts(p) {
  if (p.top_texts.length === 0) {
    return [el("p", { class: "absent" }, "It wrote nowhere in the analysed texts: no texts.")];
  }
  const list = el("ol", { class: "texts" });
  const key = el("div", { class: "legend" });
  const items = p.top_texts.map(textItem);
  list.append(...items.map((item) => item.element));
  const paint = () => {
    for (const [kind] of KINDS) list.classList.toggle(`tint-${kind}`, kind === view.kind);
    for (const item of items) item.paint();
    const ends = view.absolute ? ["0", "1"] : ["lowest in the text", "highest"];
    key.className = `legend tint-${view.kind}`;
    key.replaceChildren(
      el("span", { class: "key" }, ends[0], el("span", { class: "ramp tinted" }), ends[1]));
  };
  paint();
  return [
    el("div", { class: "choices" },
      choice("Colour words by", KINDS, view.kind, (kind) => { view.kind = kind; paint(); }),
      choice("Scale", [["own", "range of each text"], ["absolute", "0 to 1"]],
        view.absolute ? "absolute" : "own",
        (scale) => { view.absolute = scale === "absolute"; paint(); })),
    key, list,
  ];
}

function textItem(topText) {
  const text = report.texts[topText.text];
  const values = Object.fromEntries(KINDS.map(([kind]) => [kind, byWord(topText, kind)]));
  const spans = text.words.map((word, i) => {
    const span = el("span", { class: "word" }, word.trimStart().replace(/\n/g, "↵\n"));
    span.tabIndex = i === 0 ? 0 : -1;
    const readings = KINDS.map(([kind]) => `${kind} ${number(values[kind][i])}`).join(" · ");
    span.dataset.values = `${visible(word.trim())}: ${readings}`;
    return span;
  });
  // The space before a word takes no colour.
  const run = text.words.flatMap((word, i) => {
    const space = word.slice(0, word.length - word.trimStart().length);
    return [space.replace(/\n/g, "↵\n"), spans[i]];
  });
  const carried = el("div", { class: "carried", role: "status" });
  const choose = (span) => {
    if (spans.includes(span)) carriedTo(text, spans.indexOf(span), spans, carried);
  };
  const line = el("p", { class: "words-line", role: "group",
    "aria-label": "Words; arrow keys move, Enter shows what prototypes carry to a word", on: {
      click: (event) => choose(event.target),
      pointerover: (event) => showTip(event.target), pointerout: hideTip,
      focusin: (event) => showTip(event.target), focusout: hideTip,
      keydown: (event) => {
        if (event.key === "Enter") choose(event.target);
        else moveInText(event, spans);
      },
    } }, ...run);
  const plot = el("div", { class: "curves" });
  const button = el("button", { type: "button", "aria-expanded": "false" }, "Curves");
  button.addEventListener("click", () => {
    const shows = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", !shows);
    if (shows) plot.replaceChildren();
    else drawCurves(plot, topText);
  });
  const element = el("li", {},
    el("p", { class: "small" }, `mean ${number(topText.mean)} · sum ${number(topText.sum)} · `
      + `perplexity ${number(text.perplexity)} · document ${whole(text.document)} `, button),
    line, carried, plot);
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
  if (event.key === "Escape") hideTip();
  const goal = step && spans[spans.indexOf(event.target) + step];
  if (!goal) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
}

function showTip(span) {
  if (!span.dataset || !span.dataset.values) return;
  const tip = byId("tip");
  tip.textContent = span.dataset.values;
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  // A word that is broken over two lines has two boxes; the first is where it begins.
  const place = span.getClientRects()[0];
  const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(place.left, most))}px`;
  const above = place.top - tip.offsetHeight - 6;
  tip.style.top = `${above < 0 ? place.bottom + 6 : above}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
