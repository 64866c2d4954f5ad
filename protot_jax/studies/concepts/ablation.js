// The interventions panel: what changes where the open prototype is left out, as measured by the
// report, and what prototypes carry to a word that is chosen in a text.

const CHANGED_WORDS = 3;

function ablation(p) {
  if (!p.ablation) return "";
  const { change, harm_percentile: percentile, controls, texts } = p.ablation;
  const compared = percentile === null ? "The layer has no other prototype to compare with."
    : `On the same texts it does more harm than ${whole(Math.round(percentile))} % of the other `
      + `${whole(controls)} prototypes of its layer.`;
  const rows = p.top_texts.slice(0, texts).map((topText, i) => [
    `text ${i + 1}`, number(mean(topText.ablated.filter((x) => x !== null))),
    el("bdi", {}, mostChanged(topText)),
  ]);
  return el("section", { class: "ablation", "aria-label": "Intervention" },
    el("h4", {}, "Scaled to 0"),
    el("p", { class: "small" }, "With its read gate at 0 at every token, the log probability of a "
      + `token changes by ${number(change)} nats on average. ${compared}`),
    tableOf("Its first texts without it, in nats", ["", "mean change", "words that change most"],
      rows));
}

// A word changes by the sum over its tokens.
function mostChanged(topText) {
  const { words, word_of: wordOf } = report.texts[topText.text];
  const changes = words.map(() => 0);
  topText.ablated.forEach((x, token) => { changes[wordOf[token]] += x || 0; });
  return words.map((word, i) => [word.trim(), changes[i]])
    .sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, CHANGED_WORDS)
    .map(([word, x]) => `${visible(word)} ${number(x)}`).join(" · ");
}

// What prototypes add directly to the logits of the tokens of a word, and where it comes from.
function carriedTo(text, word, spans, place) {
  for (const span of spans) span.classList.remove("chosen", "source");
  const { carried, tokens, word_of: wordOf } = text;
  if (!carried) {
    place.replaceChildren(el("p", { class: "absent" }, report.model.heads > 1
      ? "What prototypes carry is computed for models with one head alone."
      : "What prototypes carry was computed for the first texts of each prototype only."));
    return;
  }
  spans[word].classList.add("chosen");
  const nameOf = (k) => (k < 0 ? "the beginning" : `“${visible(tokens[k])}”`);
  const tables = tokens.flatMap((token, i) => {
    if (wordOf[i] !== word) return [];
    if (!carried.layer[i].length) {
      return [el("p", { class: "absent" }, `${nameOf(i)}: no prototype has read a token before it.`)];
    }
    for (const k of carried.source[i]) if (k >= 0) spans[wordOf[k]].classList.add("source");
    const rows = carried.layer[i].map((layer, n) => {
      const p = { layer, prototype: carried.prototype[i][n] };
      return [el("a", { href: hashOf(p) }, title(p)), number(carried.logit[i][n]),
        `${nameOf(carried.source[i][n])} ${number(carried.part[i][n])}`];
    });
    return [tableOf(`Strongest direct parts of the logit of ${nameOf(i)}`,
      ["prototype", "adds", "most of it from"], rows)];
  });
  place.replaceChildren(...tables);
}
