// The curves of the selected adapter, or one curve of several adapters.
import { draw, smooth } from "./charts.js";
import { byId, count, el, loss, setText } from "./dom.js";

// The curve of the losses that the server computes, by ForwardBackward.
const STEPS = "steps";
const LOSS = "loss";
// What an adapter is judged by, if its client reports it.
const JUDGED_BY = [LOSS, "reward"];

let wanted = ""; // The name of the curve that the user chose, if any.

const last = (values) => values[values.length - 1];
const titled = (name) => name[0].toUpperCase() + name.slice(1);
const valueText = (value) => String(Number(value.toPrecision(6)));

// Returns the names of the selected adapter's curves, what it is judged by first.
function namesOf({ curves, surrogate, steps }) {
  const reported = curves.map((curve) => curve.name);
  const first = JUDGED_BY.filter((name) => reported.includes(name));
  const others = reported.filter((name) => !first.includes(name));
  const own = steps.length > 0 ? [STEPS] : [];
  return surrogate ? [...first, ...others, ...own] : [...first, ...own, ...others];
}

function labelOf(name, { curves, surrogate }) {
  if (name !== STEPS) return name;
  if (surrogate) return "surrogate";
  return curves.some((curve) => curve.name === LOSS) ? "loss of each call" : LOSS;
}

// Fills the list of curves, and returns the one to show; undefined if there is
// none.
function choose(selected) {
  const names = namesOf(selected);
  const list = byId("curve");
  const same =
    list.options.length === names.length &&
    names.every((name, i) => {
      const { value, text } = list.options[i];
      return value === name && text === labelOf(name, selected);
    });
  if (!same) {
    list.replaceChildren(
      ...names.map((name) => el("option", { value: name, text: labelOf(name, selected) })),
    );
  }
  list.hidden = names.length < 2;
  const name = names.includes(wanted) ? wanted : names[0];
  if (name !== undefined) list.value = name;
  return name;
}

// The name of the curve that Compare asks for.
export const comparedCurve = () => (wanted === STEPS || wanted === "" ? LOSS : wanted);

// Runs `changed` when the user chooses a curve.
export function whenChosen(changed) {
  byId("curve").addEventListener("change", (event) => {
    wanted = event.target.value;
    changed();
  });
}

// Draws a curve of several adapters by their OptimSteps.
function drawCompared(compared) {
  const name = compared[0]?.name ?? LOSS;
  const shown = compared.filter((curve) => curve.values.length > 0);
  const xs = [...new Set(shown.flatMap((curve) => curve.at))].sort((a, b) => a - b);
  const series = shown.map((curve, i) => {
    const at = new Map(curve.at.map((place, k) => [place, curve.values[k]]));
    return { name: curve.id, ys: xs.map((place) => at.get(place)), kind: `of-${i}` };
  });
  setText(byId("loss-title"), titled(name));
  draw(byId("loss"), {
    xs,
    series,
    fromZero: false,
    xText: (place) => (Number.isInteger(place) ? String(place) : ""),
    yText: valueText,
    readout: (i) => `update ${xs[i]}: ` + series
      .filter((line) => line.ys[i] !== undefined)
      .map((line) => `${line.name} ${loss(line.ys[i])}`)
      .join(", "),
    label: `${titled(name)} of ${shown.length} adapters by update. Arrow keys read values.`,
    empty: `None of these adapters has a curve ${name}.`,
  });
  const without = compared.filter((curve) => curve.values.length === 0).map((curve) => curve.id);
  const others = without.length > 0 ? ` Without ${name}: ${without.join(", ")}.` : "";
  setText(byId("loss-note"), "By update: the listed adapters that were used last, at most " +
    `eight. Search to choose others.${others}`);
}

// Draws a curve that the adapter's client reports.
function drawReported(selected, name) {
  const { at, values } = selected.curves.find((curve) => curve.name === name);
  drawOne(selected.id, titled(name), values, at, (i) => `update ${at[i]}: ${loss(values[i])}`);
  setText(byId("loss-note"), "By update, as the client reports it.");
}

// Draws what the server computes.
function drawSteps(selected) {
  const { steps, losses, tokens, ended_at: endedAt, surrogate } = selected;
  drawOne(selected.id, surrogate ? "Surrogate" : "Loss", losses, steps, (i) =>
    `step ${steps[i]}: ${loss(losses[i])}, ${count(tokens[i])} tokens, ` +
    new Date(endedAt[i] * 1000).toLocaleTimeString("en-GB"));
  setText(byId("loss-note"), surrogate
    ? "By step. It has the gradient of what the client optimizes, but its value says nothing. " +
      "The client can report its own loss and reward."
    : "By step: the sum of the losses divided by the sum of the weights, per ForwardBackward.");
}

function drawOne(id, title, values, places, readout) {
  setText(byId("loss-title"), `${title} of ${id}`);
  const smoothed = smooth(values, 0.8);
  draw(byId("loss"), {
    xs: values.map((_, i) => i),
    series: [
      { name: "each", ys: values, kind: "raw" },
      { name: "smoothed", ys: smoothed, kind: "one" },
    ],
    fromZero: false,
    xText: (i) => (Number.isInteger(i) && i in places ? String(places[i]) : ""),
    yText: valueText,
    readout,
    label: `${title} of ${id}, the last ${values.length} values, ` +
      `from ${loss(smoothed[0])} to ${loss(last(smoothed))}. Arrow keys read values.`,
    empty: "",
  });
}

// Draws a curve of the selected adapter, or one of several adapters.
export function showCurve(state, id) {
  if (state.compared) return drawCompared(state.compared);
  const selected = state.selected;
  const name = selected && choose(selected);
  if (name !== undefined) {
    return name === STEPS ? drawSteps(selected) : drawReported(selected, name);
  }
  byId("curve").hidden = true;
  setText(byId("loss-title"), id ? `Loss of ${id}` : "Loss");
  setText(byId("loss-note"), "");
  const empty = id ? "No training step has ended since the server started." : "";
  draw(byId("loss"), { xs: [], series: [], fromZero: false, empty });
}

// Draws the gradient norms of the selected adapter.
export function showGradients(state) {
  const { update_steps: steps, grad_norms: norms, id } = state.selected ?? {};
  const known = !state.compared && (norms?.length ?? 0) > 0;
  byId("gradients-part").hidden = !known;
  if (!known) return;
  draw(byId("gradients"), {
    xs: steps.map((_, i) => i),
    series: [{ name: "", ys: norms, kind: "two" }],
    fromZero: true,
    height: 110,
    xText: (i) => (Number.isInteger(i) && i in steps ? String(steps[i]) : ""),
    yText: (value) => String(Number(value.toPrecision(3))),
    readout: (i) => `step ${steps[i]}: ${loss(norms[i])}`,
    label: `Gradient norms of the last ${steps.length} updates of ${id}. ` +
      "Arrow keys read values.",
    empty: "",
  });
}
