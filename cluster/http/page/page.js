// Joins the parts: a turn of the conversation asks for one answer, or for two that differ in speculation alone.

import { request } from "./api.js";
import { Answer, element } from "./answer.js";
import { watchEngines } from "./engines.js";

const SPECULATIVE = { on: [true], off: [false], turns: [true, false], both: [true, false] };
const byId = (id) => document.getElementById(id);
const messages = [];
let model = null;
let running = null; // the AbortController of the turn under way

async function servedModel() {
  model ??= (await (await request("v1/models")).json()).data[0].id;
  byId("model").textContent = model;
  return model;
}

/** The parameters that are filled in; the others are the server's defaults. */
function sampling() {
  const body = {};
  for (const [name, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"], ["seed", "seed"]]) {
    if (byId(id).value !== "") body[name] = Number(byId(id).value);
  }
  return body;
}

async function turn(prompt) {
  const mode = byId("mode").value;
  const answers = SPECULATIVE[mode].map((speculative) => new Answer(speculative));
  const row = element("div", "answers");
  row.append(...answers.map((answer) => answer.node));
  byId("turns").append(element("p", "question", prompt), row);
  const controller = (running = new AbortController());
  setRunning(true);
  const scrolling = setInterval(() => (byId("chat").scrollTop = byId("chat").scrollHeight), 100);
  try {
    const body = { model: await servedModel(), messages: [...messages, { role: "user", content: prompt }], ...sampling() };
    if (mode === "both") await Promise.all(answers.map((answer) => answer.run(body, controller.signal)));
    else for (const answer of answers) if (!controller.signal.aborted) await answer.run(body, controller.signal);
    if (answers[0].failed || !answers[0].content) return;
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: answers[0].content });
    if (answers.length === 2 && !controller.signal.aborted && !answers[1].failed) row.after(comparison(answers));
  } catch (error) {
    row.replaceChildren(element("p", "failed", error.message));
  } finally {
    clearInterval(scrolling);
    byId("chat").scrollTop = byId("chat").scrollHeight;
    setRunning(false);
  }
}

function comparison([on, off]) {
  const same = on.content === off.content ? "Both answers are the same." : "The answers differ.";
  const [fast, slow] = [on.tokensPerSecond(), off.tokensPerSecond()];
  const times = fast && slow ? ` ${(fast / slow).toFixed(2)} times the tokens per second with speculation.` : "";
  return element("p", "same", same + times);
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("clear").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  if (!isRunning) running = null;
}

function send(event) {
  event.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (!prompt || running) return;
  byId("prompt").value = "";
  turn(prompt);
}

byId("composer").addEventListener("submit", send);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  messages.length = 0;
  byId("turns").replaceChildren();
});
setRunning(false);
servedModel().catch(() => {}); // the engines' state says what is wrong, and the first turn asks again
watchEngines();
