// Asks the server every two seconds and shows the answer.
import { Adapters, showCheckpoints, showFacts } from "./adapters.js";
import { makeReadable } from "./charts.js";
import { comparedCurve, showCurve, showGradients, whenChosen } from "./curves.js";
import { byId, setText } from "./dom.js";
import {
  showErrors, showMemory, showPhase, showServer, showSpeed, showTenants, showTiles,
} from "./panels.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 5000;
// The page says how old its numbers are when no answer has come for so long.
const STALE_SECONDS = 5;
const HISTORY_SECONDS = 600;
// Rates are means over this time, because steps end in bursts.
const RATE_SECONDS = 10;
// Over less than this a rate says nothing: a selection polls at once.
const SHORT_SECONDS = 1;
// Every so many polls the checkpoints are asked for, too: they are on disk.
const CHECKPOINT_POLLS = 15;
const TOKEN = "weft-token";

let timer = 0;
let request = null;
let polls = 0;
let state = null; // The latest answer.
let answeredAt = performance.now();
let comparing = false;
let checkpoints = { id: "", list: null };
// Readings of the totals of tokens, by adapter; "" is the whole view.
const readings = new Map();
const speed = []; // What the chart of tokens per second shows.

const adapters = new Adapters(() => poll());

function address() {
  const id = adapters.selected;
  const query = new URLSearchParams({ q: byId("search").value.trim(), adapter: id });
  if (speed.length === 0) query.set("history", "1");
  if (comparing) query.set("compare", comparedCurve());
  if (id && (id !== checkpoints.id || polls % CHECKPOINT_POLLS === 0)) {
    query.set("checkpoints", "1");
  }
  return `console/v1/state?${query}`;
}

async function ask(signal) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(address(), { headers, signal, cache: "no-store" });
  if (reply.status === 401 || reply.status === 403) {
    return { refused: token ? (await reply.json()).detail : "" };
  }
  if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
  return { state: await reply.json() };
}

// Asks now, and again after the interval. A newer call replaces an older one.
async function poll() {
  clearTimeout(timer);
  request?.abort();
  const mine = new AbortController();
  request = mine;
  const late = new Error(`within ${TIMEOUT_MS / 1000} s`);
  const limit = setTimeout(() => mine.abort(late), TIMEOUT_MS);
  let answer = {};
  let failure = "";
  try {
    answer = await ask(mine.signal);
  } catch (error) {
    failure = `No answer (${error.message}). Trying again.`;
  }
  clearTimeout(limit);
  if (request !== mine) return;
  setText(byId("status"), failure);
  if (!failure) answeredAt = performance.now();
  if (answer.refused !== undefined) return askForToken(answer.refused);
  if (!document.hidden) timer = setTimeout(poll, INTERVAL_MS);
  polls += 1;
  if (answer.state) take(answer.state);
  showAge();
}

// Says how old the numbers are if no answer has come for long.
function showAge() {
  const seconds = Math.floor((performance.now() - answeredAt) / 1000);
  const stale = state !== null && seconds >= STALE_SECONDS;
  document.body.classList.toggle("stale", stale);
  showPhase(state, stale ? seconds : 0);
}

function askForToken(why) {
  state = null;
  showAge();
  byId("main").hidden = true;
  byId("who").hidden = true;
  byId("token-form").hidden = false;
  setText(byId("token-error"), why);
  byId("token").focus();
}

// Adds a reading and returns the rates since the oldest one that is kept; null
// before the second one. A reading that comes too soon is left out.
function rates(key, now, train, sampled) {
  let kept = readings.get(key) ?? [];
  const last = kept.at(-1);
  // After a restart the totals begin again.
  if (last && (train < last.train || sampled < last.sampled)) kept = [];
  const newest = kept.at(-1);
  const soon = newest && now - newest.at < SHORT_SECONDS;
  const latest = soon ? newest : { at: now, train, sampled };
  if (!soon) kept.push(latest);
  while (kept.length > 2 && kept[0].at < now - RATE_SECONDS) kept.shift();
  readings.set(key, kept);
  const seconds = latest.at - kept[0].at;
  if (seconds <= 0) return { train: null, sampled: null };
  return {
    train: (latest.train - kept[0].train) / seconds,
    sampled: (latest.sampled - kept[0].sampled) / seconds,
  };
}

function takeHistory() {
  if (speed.length > 0 || !state.history) return;
  for (const [at, train, sampled] of state.history) speed.push({ at, train, sampled });
}

function takeRates() {
  for (const adapter of state.adapters) {
    const own = rates(adapter.id, state.now, adapter.train_tokens, adapter.sampled_tokens);
    adapter.train_rate = own.train;
    adapter.sample_rate = own.sampled;
  }
  const listed = new Set(["", ...state.adapters.map((adapter) => adapter.id)]);
  for (const key of readings.keys()) {
    if (!listed.has(key)) readings.delete(key);
  }
  const all = rates("", state.now, state.tokens.train, state.tokens.sampled);
  const recent = speed.length > 0 && state.now - speed.at(-1).at < SHORT_SECONDS;
  if (all.train !== null && !recent) speed.push({ at: state.now, ...all });
  while (speed.length > 0 && speed[0].at < state.now - HISTORY_SECONDS) speed.shift();
  return all;
}

function take(fresh) {
  state = fresh;
  byId("token-form").hidden = true;
  showServer(state);
  showErrors(state);
  byId("main").hidden = !state.adapters;
  if (!state.adapters) return;
  takeHistory();
  const all = takeRates();
  if (state.selected?.checkpoints) {
    checkpoints = { id: state.selected.id, list: state.selected.checkpoints };
  }
  showTiles(state, all);
  adapters.show(state);
  drawAll();
}

function drawAll() {
  if (!state?.adapters) return;
  showCurve(state, adapters.selected);
  showGradients(state);
  showFacts(state);
  const known = state.selected && checkpoints.id === state.selected.id;
  showCheckpoints(known ? checkpoints.list : null, state.now);
  showSpeed(speed, state);
  showMemory(state);
  showTenants(state);
}

function compare() {
  comparing = !comparing;
  byId("compare").setAttribute("aria-pressed", String(comparing));
  poll();
}

function submitToken(event) {
  event.preventDefault();
  // A key of the Tinker API is the token behind a prefix.
  sessionStorage.setItem(TOKEN, byId("token").value.trim().replace(/^tml-/, ""));
  byId("token").value = "";
  poll();
}

function forget() {
  sessionStorage.removeItem(TOKEN);
  location.reload();
}

function key(event) {
  const typing = event.target.matches("input, textarea");
  const search = byId("search");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    search.focus();
  } else if (event.key === "Escape" && event.target === search) {
    search.value = "";
    search.blur();
    poll();
  }
}

let searching = 0;
byId("search").addEventListener("input", () => {
  clearTimeout(searching);
  searching = setTimeout(poll, 200);
});
byId("token-form").addEventListener("submit", submitToken);
byId("forget").addEventListener("click", forget);
byId("compare").addEventListener("click", compare);
whenChosen(() => (comparing ? poll() : drawAll()));
document.addEventListener("keydown", key);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
for (const id of ["loss", "gradients", "speed"]) {
  makeReadable(byId(id));
  new ResizeObserver(() => drawAll()).observe(byId(id));
}
setInterval(showAge, 1000);
poll();
