// The state of engines and ranks, live: /health and /metrics every two seconds.

import { GoneError, request } from "./api.js";
import { element } from "./element.js";
import { metric, parseMetrics } from "./figures.js";

const EVERY_MS = 2000;
const LIMIT_MS = 5000; // of a reply: a server that is stopped takes connections, and never answers
const POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
const BRANCHES = "aerie:spec_decode_accepted_tokens_by_branch_total";
const DRAFTS = "vllm:spec_decode_num_drafts_total";
const TOKENS = "vllm:generation_tokens_total";
const STATES = { ready: "ok", unavailable: "bad", gone: "bad" };

let first = null; // samples when the page opened
let last = null; // {samples, ms} of the last time
let wake = () => {};

/** Calls `changed({state, hasDrafts})` after each look. state: a key of `STATES`. */
export async function watchEngines(changed) {
  for (;;) {
    if (!document.hidden) changed(await update());
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, EVERY_MS);
    });
  }
}

/** Look at once. */
export const lookNow = () => wake();

async function update() {
  let state = "gone";
  let hasDrafts = null; // unknown
  try {
    const limit = { signal: AbortSignal.timeout(LIMIT_MS) };
    const health = await (await request("health", limit, [503])).json();
    state = health.status === "ok" ? "ready" : "unavailable";
    showFault(health.error?.message);
    const samples = parseMetrics(await (await request("metrics", limit)).text());
    const now = { samples, ms: performance.now() };
    first ??= samples;
    hasDrafts = samples.some((sample) => sample.name === POSITIONS);
    showEngines(health.engines ?? [], now);
    showServer(now);
    showPositions(samples);
    showBranches(samples);
    last = now;
  } catch (error) {
    if (!(error instanceof GoneError)) state = "unavailable";
    showFault(error.message);
  }
  const node = document.getElementById("state");
  if (node.textContent !== state) node.textContent = state; // a screen reader says each change
  node.className = `state ${STATES[state]}`;
  return { state, hasDrafts };
}

function showFault(message) {
  const fault = document.getElementById("fault");
  fault.hidden = !message;
  fault.textContent = message ?? "";
}

/** How much a counter grew in a second since the last time. */
function growth(now, name, labels) {
  const before = last && metric(last.samples, name, labels);
  const after = metric(now.samples, name, labels);
  if (before === null || after === null || after < before) return null;
  return (after - before) / ((now.ms - last.ms) / 1000);
}

function showEngines(engines, now) {
  const nodes = engines.map((engine) => {
    const node = element("div", "engine");
    const counts = `${engine.num_running} running, ${engine.num_waiting} waiting`;
    node.append(element("div", "", `${engine.engine_id}: ${engine.status}, ${counts}`));
    if (engine.detail) node.append(element("div", "note", engine.detail));
    const table = element("table");
    const head = element("tr");
    head.append(...["rank", "heard of", "steps/s"].map((title) => element("th", "", title)));
    table.append(head);
    for (const [rank, age] of engine.heartbeat_age_s.entries()) {
      const steps = growth(now, "aerie:rank_steps_total", { engine: engine.engine_id, rank: String(rank) });
      const row = element("tr");
      const cells = [rank, `${age.toFixed(1)} s ago`, steps === null ? "–" : steps.toFixed(1)];
      row.append(...cells.map((cell) => element("td", "", String(cell))));
      table.append(row);
    }
    node.append(table);
    return node;
  });
  document.getElementById("engines").replaceChildren(...nodes);
}

function showServer(now) {
  const rate = growth(now, TOKENS);
  const usage = metric(now.samples, "vllm:kv_cache_usage_perc");
  const lines = [
    ["tokens/s, all requests", rate === null ? "–" : rate.toFixed(1)],
    ["KV pages in use", usage === null ? "–" : `${(100 * usage).toFixed(1)} %`],
  ];
  const nodes = lines.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]);
  document.getElementById("server").replaceChildren(...nodes);
}

/** How much a counter grew since the page opened. */
function since(samples, name, labels) {
  return (metric(samples, name, labels) ?? 0) - (metric(first, name, labels) ?? 0);
}

/** What each method drafted of the accepted tokens; a branch that is copied from the text is the method "suffix". */
function showBranches(samples) {
  const drafts = since(samples, DRAFTS);
  const branches = new Set(samples.filter((sample) => sample.name === BRANCHES).map((sample) => sample.labels.branch));
  const nodes = Array.from(branches).flatMap((branch) => {
    const accepted = since(samples, BRANCHES, { branch });
    return [element("dt", "", branch), element("dd", "", drafts > 0 ? (accepted / drafts).toFixed(2) : "–")];
  });
  document.getElementById("branches").replaceChildren(...nodes);
}

function showPositions(samples) {
  const drafts = since(samples, DRAFTS);
  const positions = samples.filter((sample) => sample.name === POSITIONS).map((sample) => sample.labels.position);
  const bars = positions.map((position) => {
    const share = drafts > 0 ? since(samples, POSITIONS, { position }) / drafts : 0;
    const bar = element("div", "bar");
    const track = element("div", "track");
    const fill = element("div", "fill");
    fill.style.width = `${100 * share}%`;
    track.append(fill);
    const label = element("span", "share", drafts > 0 ? `${(100 * share).toFixed(0)} %` : "–");
    bar.append(element("span", "", String(Number(position) + 1)), track, label);
    return bar;
  });
  document.getElementById("positions").replaceChildren(...(bars.length ? bars : [element("p", "note", "no draft")]));
}
