// What the reader has set: kept in localStorage, read for each turn. An empty field is the server's default.

const KEY = "aerie-page";
const FIELDS = ["mode", "view", "theme", "system", "thinking", "temperature", "top-p", "max-tokens", "seed"];
// Parameter -> the field it is read from.
const SAMPLING = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens", seed: "seed" };
const byId = (id) => document.getElementById(id);
let thinkingVariable = null;

/** Fills the fields with what was set last, and keeps what is changed. `changed` is called with a field's id. */
export function rememberSettings(changed) {
  const saved = read();
  for (const id of FIELDS) {
    if (typeof saved[id] === "string") byId(id).value = saved[id];
    if (byId(id).selectedIndex === -1) byId(id).selectedIndex = 0; // a choice that the page no longer has
    byId(id).addEventListener("change", () => {
      write(Object.fromEntries(FIELDS.map((field) => [field, byId(field).value])));
      changed(id);
    });
  }
}

/** Shows the model's defaults in the empty fields, and the switch of thinking if the model has one. */
export function showDefaults({ default_sampling_params: sampling = {}, thinking = null }) {
  byId("temperature").placeholder = sampling.temperature ?? "";
  byId("top-p").placeholder = sampling.top_p ?? 1;
  thinkingVariable = thinking?.variable ?? null;
  byId("thinking-label").hidden = !thinking;
  byId("thinking-default").textContent = `default (${thinking?.default ? "on" : "off"})`;
}

/** The parameters of a turn. Without a seed one is drawn, so that answers with and without drafts can be equal. */
export function parameters() {
  const body = { seed: Math.floor(Math.random() * 2 ** 31) };
  for (const [name, id] of Object.entries(SAMPLING)) if (byId(id).value !== "") body[name] = Number(byId(id).value);
  const thinking = byId("thinking").value;
  if (thinkingVariable && thinking) body.chat_template_kwargs = { [thinkingVariable]: thinking === "on" };
  return body;
}

/** The system prompt as messages: one, or none. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

function write(settings) {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch {
    // no storage in this browser: settings last as long as the page
  }
}
