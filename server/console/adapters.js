// The table of adapters, and the facts of the selected one.
import { sparkline } from "./charts.js";
import {
  NONE, ago, byId, bytes, count, el, fillPairs, loss, rate, setText, svg, table,
} from "./dom.js";

const last = (values) => values[values.length - 1];

// Where the adapter's tensors are, unless the server still restores it.
const stateOf = (a) => (a.restoring ? "restoring" : a.location);

// Adapters that were used so lately stand first, by name, so that rows rest.
const IN_USE_SECONDS = 60;

const lastUse = (a, now) => (now - a.last_used_at < IN_USE_SECONDS ? -Infinity : -a.last_used_at);

// A column: title, class, text of an adapter, what rows are sorted by.
// Narrow pages leave out "mid", "wide" and "widest" columns.
const COLUMNS = [
  ["Adapter", "name", (a) => a.id, (a) => a.id],
  ["Tenant", "name wide tenant", (a) => a.tenant, (a) => a.tenant],
  ["State", "name mid", stateOf, stateOf],
  ["Rank", "num widest", (a) => count(a.rank), (a) => a.rank],
  ["Step", "num", (a) => count(a.step), (a) => a.step],
  ["Durable", "num widest", (a) => count(a.durable_step), (a) => a.durable_step],
  ["Updates", "num mid", (a) => count(a.optim_steps), (a) => a.optim_steps],
  ["Loss", "num", (a) => loss(last(a.losses)), (a) => last(a.losses) ?? Infinity],
  ["Trend", "trend", null, null],
  ["Train/s", "num mid", (a) => rate(a.train_rate), (a) => -(a.train_rate ?? 0)],
  ["Sample/s", "num mid", (a) => rate(a.sample_rate), (a) => -(a.sample_rate ?? 0)],
  ["Used", "num mid", (a, now) => ago(a.last_used_at, now), lastUse],
];

export class Adapters {
  // `changed` runs when the user selects another adapter.
  constructor(changed) {
    this.changed = changed;
    this.selected = "";
    this.sorted = COLUMNS.length - 1; // The column's index.
    this.down = false;
    this.rows = new Map(); // Rows by adapter.
    this.body = el("tbody");
    this.head = COLUMNS.map((column, i) => this.header(column, i));
    this.grid = el(
      "table",
      { role: "grid", "aria-labelledby": "adapters-title", class: "adapters" },
      el("thead", {}, el("tr", {}, ...this.head)),
      this.body,
    );
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.note = el("p", { class: "note empty" });
    byId("adapters").replaceChildren(this.grid, this.note);
  }

  header([title, kind, , order], i) {
    const cell = el("th", { scope: "col", class: kind });
    if (!order) {
      cell.textContent = title;
      return cell;
    }
    const button = el("button", { type: "button", class: "sort", text: title });
    button.addEventListener("click", () => {
      this.down = this.sorted === i && !this.down;
      this.sorted = i;
      this.show(this.state);
    });
    cell.append(button);
    return cell;
  }

  // Moves the focus among the rows, or selects the focused one.
  key(event) {
    const rows = [...this.body.rows];
    const at = rows.indexOf(event.target);
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (at < 0) return;
    if (event.key === "Enter" || event.key === " ") this.select(event.target.dataset.id);
    else if (to !== undefined) rows[Math.min(Math.max(to, 0), rows.length - 1)].focus();
    else return;
    event.preventDefault();
  }

  select(id) {
    this.selected = id;
    this.show(this.state);
    this.changed();
  }

  makeRow(id) {
    const cells = COLUMNS.map(([, kind]) => el("td", { class: kind, role: "gridcell" }));
    const trend = svg("svg", { class: "spark", "aria-hidden": "true" });
    cells[COLUMNS.findIndex((column) => column[1] === "trend")].append(trend);
    const row = el("tr", { role: "row" }, ...cells);
    row.dataset.id = id;
    row.addEventListener("click", () => this.select(id));
    row.addEventListener("focus", () => this.rove(row));
    return { row, cells, trend };
  }

  // Makes one row the table's stop for the tab key.
  rove(row) {
    for (const other of this.body.rows) other.tabIndex = other === row ? 0 : -1;
  }

  ordered({ adapters, now }) {
    const order = COLUMNS[this.sorted][3];
    const sign = this.down ? -1 : 1;
    return [...adapters].sort((a, b) => {
      const [x, y] = [order(a, now), order(b, now)];
      return sign * (x < y ? -1 : x > y ? 1 : 0) || (a.id < b.id ? -1 : 1);
    });
  }

  show(state) {
    if (!state?.adapters) return;
    this.state = state;
    this.choose(state.adapters);
    const tenants = state.adapters.some((a) => a.tenant !== a.id) && state.caller.sees_all;
    this.grid.classList.toggle("no-tenants", !tenants);
    this.head.forEach((cell, i) => {
      const sort = this.down ? "descending" : "ascending";
      cell.setAttribute("aria-sort", i === this.sorted ? sort : "none");
    });
    const kept = new Map();
    for (const adapter of this.ordered(state)) {
      const entry = this.rows.get(adapter.id) ?? this.makeRow(adapter.id);
      kept.set(adapter.id, entry);
      this.fill(entry, adapter, state.now);
    }
    this.rows = kept;
    this.place([...kept.values()].map((entry) => entry.row));
    this.describe(state);
  }

  // Selects the adapter that was used last, until the user selects one.
  choose(adapters) {
    if (this.selected || adapters.length === 0) return;
    this.selected = adapters.reduce((a, b) => (b.last_used_at > a.last_used_at ? b : a)).id;
    this.changed();
  }

  fill({ row, cells, trend }, adapter, now) {
    COLUMNS.forEach(([, , text], i) => {
      if (text) setText(cells[i], text(adapter, now));
    });
    cells[0].title = adapter.id;
    sparkline(trend, adapter.losses);
    row.setAttribute("aria-selected", String(adapter.id === this.selected));
    row.classList.toggle("restoring", adapter.restoring);
  }

  // Puts the rows into the body in this order; touches it only where it
  // differs, so that the focus stays.
  place(rows) {
    const focused = document.activeElement;
    const same =
      rows.length === this.body.rows.length && rows.every((row, i) => row === this.body.rows[i]);
    if (!same) this.body.replaceChildren(...rows);
    if (rows.includes(focused) && document.activeElement !== focused) focused.focus();
    if (!rows.some((row) => row.tabIndex === 0)) {
      this.rove(this.rows.get(this.selected)?.row ?? rows[0]);
    }
  }

  describe(state) {
    const [listed, matching] = [state.adapters.length, state.num_matching];
    const all = state.num_adapters;
    let text = `${count(all)}`;
    if (matching < all) text = `${count(matching)} of ${count(all)}`;
    if (listed < matching) text += `, the ${listed} used last are listed`;
    setText(byId("shown"), text);
    this.grid.hidden = listed === 0;
    this.note.hidden = listed > 0;
    setText(this.note, all === 0 ? "There are no adapters." : "No adapter matches.");
  }
}

// Lists the facts of the selected adapter.
export function showFacts(state) {
  const selected = state.selected;
  const adapter = state.adapters.find((a) => a.id === selected?.id);
  byId("selected-card").hidden = !adapter;
  if (!adapter) return;
  setText(byId("selected-title"), selected.id);
  fillPairs(byId("selected"), [
    ["Step", `${count(adapter.step)}, durable ${count(adapter.durable_step)}`],
    ["Updates", count(adapter.optim_steps)],
    ["Gradient", adapter.accumulated_tokens ? `${count(adapter.accumulated_tokens)} tokens` : NONE],
    ["LoRA", `rank ${adapter.rank}, alpha ${selected.alpha}`],
    ["Parameters", count(selected.parameters)],
    ["Targets", selected.targets.map((t) => t.replace("_proj", "")).join(" ")],
    ["Version", count(adapter.version), `epoch ${adapter.epoch}`],
    ["Epoch", new Date(adapter.epoch / 1000).toISOString().slice(0, 19).replace("T", " ")],
    ["State", `${stateOf(adapter)}, ${bytes(adapter.bytes)}`],
    ["Created", ago(selected.created_at, state.now)],
    ["Tokens", `${count(adapter.train_tokens)} trained, ${count(adapter.sampled_tokens)} sampled`],
    ["Snapshots", selected.num_snapshots ? selected.snapshots.join(", ") : NONE],
  ]);
}

// Lists the checkpoints of the selected adapter.
export function showCheckpoints(checkpoints, now) {
  const place = byId("checkpoints");
  if (!checkpoints) return place.replaceChildren();
  if (checkpoints.length === 0) {
    return place.replaceChildren(el("p", { class: "note", text: "It has no checkpoints." }));
  }
  place.replaceChildren(
    table(
      "Checkpoints",
      [
        ["Checkpoint", (c) => c.name, "name"],
        ["Step", (c) => count(c.step), "num"],
        ["Size", (c) => bytes(c.bytes), "num"],
        ["Saved", (c) => ago(c.created_at, now), "num"],
      ],
      checkpoints,
    ),
  );
}
