// The header, the numbers of now, and the panels beside the adapters.
import { draw } from "./charts.js";
import {
  NONE, ago, breakable, byId, bytes, count, duration, el, fillPairs, rate, setText, shortTime, svg,
  table,
} from "./dom.js";

// The parts of a device's memory, in the order in which they are drawn.
const PARTS = ["model", "adapters", "kv_cache", "activations", "decode_graphs", "reserve"];

// The engine's thread says so often that it moves: while it is idle, and after
// each piece of work. A piece of a large model on a CPU may take minutes.
const SILENT_SECONDS = 15;

const exact = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds));

// Shows what the server does, or that no answer has come for `lost` seconds.
export function showPhase(state, lost) {
  const badge = byId("phase");
  badge.hidden = !state;
  if (!state) return;
  let [phase, text] = [state.server.phase, state.server.phase];
  if (lost > 0) {
    [phase, text] = ["lost", `no answer for ${exact(lost)}`];
  } else if (state.server.silent_seconds > SILENT_SECONDS) {
    [phase, text] = ["lost", `engine silent for ${exact(state.server.silent_seconds)}`];
  } else if (phase === "serving" && state.num_restoring > 0) {
    phase = "restoring";
    text = `restoring ${count(state.num_restoring)} of ${count(state.num_adapters)}`;
    const left = state.server.restore_seconds;
    if (left > 0) text += `, about ${exact(left)} left`;
  }
  badge.dataset.phase = phase;
  setText(badge, text);
}

export function showServer(state) {
  const { server, caller, load } = state;
  document.title = server.model ? `${server.model} – Weft` : "Weft";
  setText(byId("model"), server.model);
  const facts = [];
  if (server.device) {
    facts.push(`${count(server.parameters)} parameters`, `${server.dtype} on ${server.device}`);
    facts.push(`context ${count(server.context_length)}`);
  }
  if (load) facts.push(`up ${duration(load.uptime_seconds)}`);
  facts.push(`version ${server.version} (${server.git})`);
  setText(byId("facts"), facts.join(" · "));
  byId("who").hidden = !caller.token;
  const view = caller.sees_all ? "sees everything" : `tenant ${caller.tenant}`;
  setText(byId("caller"), `${caller.token}, ${view}`);
}

// The unit stands once if both times have it: a tile is narrow.
function percentiles([half, most]) {
  if (!(most > 0)) return NONE;
  const [first, last] = [shortTime(half), shortTime(most)];
  const [number, unit] = first.split(" ");
  return `${last.endsWith(` ${unit}`) ? number : first} / ${last}`;
}

// Returns the free bytes of the fullest folder, and those of all.
function diskFree({ disk_free: free, disk_size: size }) {
  const folders = Object.keys(free).sort((a, b) => free[a] / size[a] - free[b] / size[b]);
  if (folders.length === 0) return [NONE];
  const each = folders.map((name) => `${name} ${bytes(free[name])} of ${bytes(size[name])}`);
  return [bytes(free[folders[0]]), each.join(", ")];
}

export function showTiles(state, speed) {
  const queued = Object.values(state.queued ?? {}).reduce((a, b) => a + b, 0);
  const kinds = Object.entries(state.queued ?? {})
    .filter(([kind, n]) => n > 0 && kind !== "all")
    .map(([kind, n]) => `${count(n)} ${kind}`);
  const tiles = [
    ["Train tokens/s", rate(speed.train)],
    ["Sample tokens/s", rate(speed.sampled)],
    ["Waiting", count(queued), kinds.join(", ") || "requests that have not started"],
    ["Adapters", count(state.num_adapters)],
  ];
  if (state.load) {
    tiles.push(["Calls open", count(state.load.calls_in_flight)]);
    tiles.push(["Updates", count(state.load.optim_steps), "optimizer steps since the start"]);
    const waits = "median and 99th percentile of the last ten minutes";
    tiles.push(["Wait p50 / p99", percentiles(state.load.queue_wait), waits, "long"]);
    tiles.push(["1st token p50 / p99", percentiles(state.load.first_token), waits, "long"]);
    tiles.push(["Disk free", ...diskFree(state.load)]);
  }
  fillPairs(byId("tiles"), tiles);
}

// Returns a time before now, as seconds or as minutes:seconds.
function back(seconds) {
  const s = Math.round(-seconds);
  if (s < 1) return "now";
  if (s < 60) return `−${s} s`;
  return `−${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
}

export function showSpeed(history, state) {
  const now = state.now;
  const xs = history.map((point) => point.at - now);
  const latest = history[history.length - 1];
  draw(byId("speed"), {
    xs,
    isTime: true,
    xRange: [Math.min(-60, xs[0] ?? -60), 0],
    series: [
      { name: "train", ys: history.map((point) => point.train), kind: "one" },
      { name: "sample", ys: history.map((point) => point.sampled), kind: "two" },
    ],
    fromZero: true,
    xText: back,
    yText: (value) => rate(value),
    readout: (i) =>
      `${back(xs[i])}: train ${rate(history[i].train)}, sample ${rate(history[i].sampled)}`,
    label: `Tokens per second: train ${rate(latest?.train)}, sample ${rate(latest?.sampled)}. ` +
      "Arrow keys read values.",
    empty: "Two readings make the first point.",
  });
  setText(byId("speed-note"), state.caller.sees_all
    ? "The last ten minutes."
    : "Since this page was opened, at most ten minutes.");
}

// Makes a bar whose parts are [class, share].
function bar(parts) {
  let from = 0;
  const rects = parts.map(([kind, share]) => {
    const rect = svg("rect", {
      class: kind,
      x: `${(from * 100).toFixed(2)}%`,
      width: `${(share * 100).toFixed(2)}%`,
      height: "100%",
    });
    from += share;
    return rect;
  });
  return svg("svg", { class: "bar", "aria-hidden": "true" }, ...rects);
}

function legend(entries) {
  return el(
    "ul",
    { class: "legend list" },
    ...entries.map(([kind, text]) => el("li", { class: `key ${kind}`, text })),
  );
}

export function showMemory(state) {
  const load = state.load;
  byId("memory-card").hidden = !load;
  if (!load) return;
  const blocks = [];
  const parts = PARTS.filter((name) => load.parts[name] > 0);
  const total = parts.reduce((sum, name) => sum + load.parts[name], 0);
  if (total > 0) {
    const kind = (name) => `part-${PARTS.indexOf(name)}`;
    blocks.push(
      el("h3", { text: `Device, ${bytes(load.device_bytes)}, as divided at the start` }),
      bar(parts.map((name) => [kind(name), load.parts[name] / total])),
      legend(parts.map((name) => [
        kind(name), `${name.replaceAll("_", " ")} ${bytes(load.parts[name])}`,
      ])),
    );
  }
  const used = load.kv_bytes > 0 ? load.kv_used_bytes / load.kv_bytes : 0;
  if (load.kv_bytes > 0) {
    const text = `Keys and values, ${bytes(load.kv_used_bytes)} of ${bytes(load.kv_bytes)}`;
    blocks.push(el("h3", { text }), bar([["part-2", used]]));
  }
  const places = el("dl", { class: "pairs" });
  const at = { device: 0, host: 0, disk: 0, ...load.adapters_at };
  fillPairs(places, [
    ["Process", bytes(load.resident_bytes)],
    ["Adapters on the device", bytes(load.adapter_bytes)],
    ["Adapters at", `${count(at.device)} device, ${count(at.host)} host, ${count(at.disk)} disk`],
  ]);
  byId("memory").replaceChildren(...blocks, places);
}

export function showTenants(state) {
  const tenants = state.tenants ?? [];
  byId("tenants-card").hidden = tenants.length === 0;
  if (tenants.length === 0) return;
  byId("tenants").replaceChildren(
    table(
      "Tenants",
      [
        ["Tenant", (t) => t.tenant, "name"],
        ["Adapters", (t) => count(t.adapters), "num"],
        ["State", (t) => bytes(t.bytes), "num"],
        ["Waiting", (t) => count(t.queued), "num"],
        ["Trained", (t) => count(t.train_tokens), "num"],
        ["Sampled", (t) => count(t.sampled_tokens), "num"],
      ],
      tenants,
    ),
  );
}

export function showErrors(state) {
  const place = byId("errors");
  if (state.errors.length === 0) {
    place.replaceChildren(el("p", { class: "note", text: "No call has failed." }));
    return;
  }
  const columns = [
    ["When", (e) => ago(e.at, state.now), "when"],
    ["Call", (e) => breakable(e.rpc), "word"],
    ["Error", (e) => breakable(e.reason || e.code), "word"],
    ["Adapter", (e) => e.adapter, "any"],
    ["Times", (e) => count(e.count), "num mid"],
  ];
  place.replaceChildren(table("Recent errors", columns, state.errors));
}
