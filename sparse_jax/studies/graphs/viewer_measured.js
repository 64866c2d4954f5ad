// Interventions that were measured: on a node, and on all members of a supernode at once.

const FROZEN = { frozen: "all", attention_frozen: "attention", free: "nothing" };

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

// A table of numbers, already written out, each row of them under a row with its name.
function numbersTable(caption, heads, rows) {
  const cell = (tag, attributes) => (text) => el(tag, { class: "right", ...attributes }, text);
  return el("table", { class: "measured" },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map(cell("th", { scope: "col" })))),
    el("tbody", {}, ...rows.flatMap(({ name, values }) => [
      el("tr", {}, el("td", { class: "name", colspan: heads.length }, ...name)),
      el("tr", {}, ...values.map(cell("td", {})))])));
}

function interventionsOn(node) {
  const list = interventionsOf.get(node.id);
  if (!list) return [];
  const measured = ["predicted", ...Object.keys(FROZEN)];
  return [
    el("h4", {}, "Interventions on it"),
    ...list.map((one, i) => el("details", { class: "intervention", open: i === 0 },
      el("summary", {}, timesText(one.factor)),
      numbersTable("Largest changes of pre-activations and logits, predicted and by what was frozen",
        ["predicted", ...Object.values(FROZEN)],
        one.effects.map((effect) => ({ name: [nameOf(effect.target)],
          values: measured.map((name) => number(effect[name])) }))))),
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
  const rows = list.flatMap((one) => one.outcomes.map((outcome) => ({
    name: [`${timesText(one.factor)}, ${FROZEN[outcome.mode]} frozen `,
      el("small", {}, `then ${tokensText(outcome.top)}`)],
    values: [number(one.predicted), number(outcome.change), percent(outcome.probability)],
  })));
  return [numbersTable(`All members scaled: change of the logit and probability of ${shortName(target)}`,
    ["predicted", "measured", "probability"], rows)];
}
