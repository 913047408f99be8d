// Makes elements and formats values. Every text becomes a text node, never
// markup, so a name from the server cannot change the page.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// Makes an element; `attributes` are set as they are, except class and text.
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  build(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS(SVG, tag), attributes, children);

// Sets a text only if it differs, so that a selection survives a poll.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const compact = new Intl.NumberFormat("en", {
  notation: "compact",
  maximumSignificantDigits: 3,
});
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const NONE = "–";

export function count(value) {
  if (value === undefined || value === null) return NONE;
  return Math.abs(value) < 10000 ? whole.format(value) : compact.format(value);
}

// A rate below 10 keeps one digit, so that slow work does not show as 0.
export function rate(value) {
  if (value === undefined || value === null) return NONE;
  return value > 0 && value < 9.95 ? value.toFixed(1) : count(value);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit + 1 < units.length) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export function loss(value) {
  if (value === undefined || value === null) return NONE;
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5)) {
    return value.toExponential(2);
  }
  return value.toPrecision(4);
}

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

// A short time, in milliseconds or seconds.
export function shortTime(seconds) {
  if (seconds < 0.95) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 9.95 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

export function ago(then, now) {
  if (!then) return NONE;
  return now - then < 1.5 ? "now" : `${duration(now - then)} ago`;
}

// Lets a name break between its words: INVALID_ARGUMENT, CreateAdapter.
export const breakable = (name) =>
  name.replaceAll("_", "_\u200b").replace(/([a-z])([A-Z])/g, "$1\u200b$2");

// Fills a list of terms and values. A pair may have a hint, and a class of its value.
export function fillPairs(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([term, value, hint, kind]) =>
      el("div", { title: hint }, el("dt", { text: term }), el("dd", { text: value, class: kind })),
    ),
  );
}

// Makes a plain table. A column is [title, text of a row, class].
export function table(label, columns, rows) {
  const head = columns.map(([title, , kind]) =>
    el("th", { scope: "col", class: kind, text: title }),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      ...columns.map(([, text, kind]) => el("td", { class: kind, text: text(row) })),
    ),
  );
  return el(
    "table",
    { "aria-label": label },
    el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...body),
  );
}
