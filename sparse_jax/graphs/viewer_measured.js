// Interventions that were measured: on a node, and on all members of a supernode at once.

const MODES = { frozen: "all frozen", attention_frozen: "attention frozen", free: "nothing frozen" };

const interventionsOf = new Map();
for (const one of graph.interventions || []) {
  if (!interventionsOf.has(one.source)) interventionsOf.set(one.source, []);
  interventionsOf.get(one.source).push(one);
}
const memberKey = (ids) => JSON.stringify([...ids].sort());
const groupInterventionsOf = new Map();
for (const one of graph.group_interventions || []) {
  const key = memberKey(one.members);
  if (!groupInterventionsOf.has(key)) groupInterventionsOf.set(key, []);
  groupInterventionsOf.get(key).push(one);
}

// Factors as a reader writes them: 0, −5.
const timesText = (factor) => `times ${withMinus(String(factor))}`;

// A table whose columns after the first are numbers, already written out.
function numbersTable(caption, heads, rows) {
  const side = (i) => (i ? "right" : "left");
  return el("div", { class: "scroll", tabindex: "0" }, el("table", { class: "measured" },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map((name, i) => el("th", { scope: "col", class: side(i) }, name)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {},
      ...cells.map((cell, i) => el("td", { class: side(i) }, cell)))))));
}

function interventionsOn(node) {
  const list = interventionsOf.get(node.id);
  if (!list) return [];
  const names = ["predicted", ...Object.keys(MODES)];
  return [
    el("h4", {}, "Interventions on it"),
    ...list.map((one, i) => el("details", { class: "intervention", open: i === 0 },
      el("summary", {}, timesText(one.factor)),
      numbersTable("Largest changes of pre-activations and logits",
        ["target", "predicted", ...Object.values(MODES)],
        one.effects.map((effect) => [nameOf(effect.target),
          ...names.map((name) => number(effect[name]))])))),
  ];
}

const tokensText = (top) => top.map(({ token, probability }) =>
  `“${oneLine(token)}” ${percent(probability)}`).join(", ");

function outcomesOf(group) {
  if (!groupInterventionsOf.size) return [];
  const list = groupInterventionsOf.get(memberKey([...group.members].map((node) => node.id)));
  if (!list) {
    return [el("p", { class: "absent" }, "This file holds no intervention on these members.")];
  }
  const target = nodes.find((node) => node.kind === "logit");
  const rows = list.flatMap((one) => one.outcomes.map((outcome) => [
    `${timesText(one.factor)}, ${MODES[outcome.mode]}`, number(one.predicted), number(outcome.change),
    percent(outcome.probability), tokensText(outcome.top)]));
  return [numbersTable(`All members scaled: change of the logit of ${shortName(target)}`,
    ["factor", "predicted", "measured", "probability", "next tokens"], rows)];
}
