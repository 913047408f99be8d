// Draws lines as inline SVG.
import { el, svg } from "./dom.js";

const MARGIN = { top: 10, right: 12, bottom: 24, left: 52 };

const SECONDS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600];

// Returns about `wanted` round values within [low, high].
export function ticks(low, high, wanted, isTime = false) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = isTime ? SECONDS : [1, 2, 5, 10].map((m) => m * power);
  const step = steps.find((s) => s >= rough) ?? steps.at(-1);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i += 1) {
    found.push(i * step);
  }
  return found;
}

// Returns the moving average that is drawn over noisy values. The first values
// count no more than later ones. A gap (null) stays a gap.
export function smooth(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}

const isKnown = (value) => value !== null && value !== undefined;

// Returns the path of a line; it is broken where a value is null, and passes by
// positions where it is undefined.
function pathOf(xs, ys, x, y) {
  let path = "";
  let pen = "M";
  ys.forEach((value, i) => {
    if (value === undefined) return;
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function rangeOf(series, fromZero) {
  const values = series.flatMap((line) => line.ys).filter(isKnown);
  let low = fromZero ? 0 : Math.min(...values);
  let high = Math.max(...values);
  if (!(high > low)) {
    const room = fromZero ? 1 : Math.max(Math.abs(high) * 0.1, 1e-6);
    low = fromZero ? 0 : low - room;
    high += room;
  }
  const room = (high - low) * 0.06;
  return [fromZero ? 0 : low - room, high + room];
}

function axes(box, x, y, chart) {
  const parts = [];
  for (const value of ticks(...y.range, box.height / 48)) {
    const at = y(value).toFixed(1);
    parts.push(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }),
      svg("text", {
        class: "tick end",
        x: box.left - 6,
        y: at,
        dy: "0.32em",
        text: chart.yText(value),
      }),
    );
  }
  for (const value of ticks(...x.range, (box.right - box.left) / 110, chart.isTime)) {
    parts.push(
      svg("text", {
        class: "tick middle",
        x: x(value).toFixed(1),
        y: box.bottom + 16,
        text: chart.xText(value),
      }),
    );
  }
  return parts;
}

function scale(range, from, to) {
  const span = range[1] - range[0] || 1;
  const map = (value) => from + ((value - range[0]) / span) * (to - from);
  map.range = range;
  return map;
}

// Draws `chart` into a figure:
//   xs: the common positions, ascending; series: [{name, ys, kind}], where kind
//   is the line's class, and ys are undefined where a line has no point;
//   fromZero; height (optional); isTime: xs are seconds; xText, yText: the text of a tick;
//   readout(i): the text of the position i; label: for screen readers;
//   empty: the text if there is nothing to draw.
export function draw(figure, chart) {
  const width = figure.clientWidth;
  const drawn = chart.xs.length > 0 && chart.series.some((s) => s.ys.some(isKnown));
  figure.setAttribute("aria-label", drawn ? chart.label : chart.empty);
  if (width === 0) return;
  if (!drawn) {
    figure.weft = null;
    figure.replaceChildren(el("p", { class: "note empty", text: chart.empty }));
    return;
  }
  const height = chart.height ?? (width < 480 ? 180 : 230);
  const box = {
    left: MARGIN.left,
    right: width - MARGIN.right,
    bottom: height - MARGIN.bottom,
    height,
  };
  const ends = [chart.xs[0], chart.xs[chart.xs.length - 1]];
  const wide = ends[0] < ends[1] ? ends : [ends[0] - 1, ends[1] + 1];
  const x = scale(chart.xRange ?? wide, box.left, box.right);
  const y = scale(rangeOf(chart.series, chart.fromZero), box.bottom, MARGIN.top);
  const lines = chart.series.map((line) =>
    chart.xs.length === 1
      ? svg("circle", { class: `dot ${line.kind}`, r: 3, cx: x(chart.xs[0]), cy: y(line.ys[0]) })
      : svg("path", { class: `line ${line.kind}`, d: pathOf(chart.xs, line.ys, x, y) }),
  );
  const cursor = svg("g", { class: "cursor" });
  const image = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    ...axes(box, x, y, chart),
    ...lines,
    cursor,
  );
  const legend = el(
    "div",
    { class: "legend" },
    ...chart.series.filter((line) => line.name).map((line) =>
      el("span", { class: `key ${line.kind}`, text: line.name }),
    ),
  );
  const previous = figure.weft;
  const readout = previous?.readout ?? el("span", { class: "readout", role: "status" });
  figure.weft = { chart, x, y, box, cursor, readout, at: previous?.at ?? null };
  figure.replaceChildren(image, el("figcaption", {}, legend, readout));
  point(figure, figure.weft.at);
}

// Shows the values at position i, or at none.
function point(figure, i) {
  const view = figure.weft;
  if (!view) return;
  const { chart, x, y, box } = view;
  view.at = i === null ? null : Math.min(Math.max(i, 0), chart.xs.length - 1);
  view.readout.textContent = view.at === null ? "" : chart.readout(view.at);
  if (view.at === null) return view.cursor.replaceChildren();
  const at = x(chart.xs[view.at]).toFixed(1);
  const known = chart.series.filter((line) => isKnown(line.ys[view.at]));
  const dots = known.map((line) => {
    const cy = y(line.ys[view.at]).toFixed(1);
    return svg("circle", { class: `dot ${line.kind}`, r: 3.5, cx: at, cy });
  });
  view.cursor.replaceChildren(
    svg("line", { class: "hair", x1: at, x2: at, y1: MARGIN.top, y2: box.bottom }),
    ...dots,
  );
}

function nearest(xs, value) {
  let best = 0;
  xs.forEach((x, i) => {
    if (Math.abs(x - value) < Math.abs(xs[best] - value)) best = i;
  });
  return best;
}

// Lets a pointer and the arrow keys read values off a figure.
export function makeReadable(figure) {
  figure.addEventListener("pointermove", (event) => {
    const view = figure.weft;
    if (!view) return;
    const { box, x, chart } = view;
    const share =
      (event.clientX - figure.getBoundingClientRect().left - box.left) / (box.right - box.left);
    point(figure, nearest(chart.xs, x.range[0] + share * (x.range[1] - x.range[0])));
  });
  const clear = () => point(figure, null);
  figure.addEventListener("pointerleave", clear);
  figure.addEventListener("blur", clear);
  figure.addEventListener("keydown", (event) => {
    const view = figure.weft;
    const last = (view?.chart.xs.length ?? 0) - 1;
    const at = view?.at ?? last + 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") clear();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    point(figure, to);
  });
}

// Draws a small line without axes into an <svg>.
export function sparkline(image, values) {
  const [width, height] = [96, 24];
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const known = values.filter((v) => v !== null);
  if (known.length < 2) return image.replaceChildren();
  const x = scale([0, values.length - 1], 2, width - 2);
  const y = scale(rangeOf([{ ys: values }], false), height - 2, 2);
  image.replaceChildren(
    svg("path", { class: "line one", d: pathOf(values.map((_, i) => i), values, x, y) }),
  );
}
