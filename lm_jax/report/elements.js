// What the scripts of our pages share: elements, and numbers as `markup.number` prints them.

const byId = (id) => document.getElementById(id);

const superscript = (mark) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(mark)];
const withMinus = (text) => text.replace("-", "−");

// A whole number, or a dash for none.
const whole = (value) => (value === null ? "–" : withMinus(value.toLocaleString("en")));

// A measured number as the rest of the page prints it: three significant digits, or a dash.
function number(value) {
  if (value === null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e4) {
    const [digits, power] = value.toExponential(2).split("e");
    const raised = power.replace("+", "").replace(/[-\d]/g, superscript);
    return withMinus(`${digits} × 10${raised}`);
  }
  return withMinus(size >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
}

// An element with attributes and children; a child that is a string becomes a text node.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [type, handler] of Object.entries(value)) element.addEventListener(type, handler);
    } else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
