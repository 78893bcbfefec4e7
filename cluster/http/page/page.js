// Joins the parts: a turn of the conversation asks for one answer, or for two that differ in speculation alone.

import { request } from "./api.js";
import { Answer } from "./answer.js";
import { deleteConversation, newConversation, saveConversation, savedConversations } from "./conversations.js";
import { button, element } from "./element.js";
import { watchEngines } from "./engines.js";
import { rememberSettings, sampling, systemMessages } from "./settings.js";

const SPECULATIVE = { on: [true], off: [false], turns: [true, false], both: [true, false] };
const byId = (id) => document.getElementById(id);
let conversation = newConversation();
let model = null;
let running = null; // the AbortController of the turn under way

async function servedModel() {
  model ??= (await (await request("v1/models")).json()).data[0].id;
  byId("model").textContent = model;
  return model;
}

async function turn(prompt) {
  const mode = byId("mode").value;
  const answers = SPECULATIVE[mode].map((speculative) => new Answer(speculative));
  if (answers.length > 1) for (const answer of answers) answer.head(`Speculation ${answer.speculative ? "on" : "off"}`);
  const row = showTurn(prompt, answers);
  const controller = (running = new AbortController());
  setRunning(true);
  try {
    const history = conversation.messages.map(({ role, content }) => ({ role, content }));
    const messages = [...systemMessages(), ...history, { role: "user", content: prompt }];
    const body = { model: await servedModel(), messages, ...sampling() };
    if (mode === "both") await Promise.all(answers.map((answer) => answer.run(body, controller.signal)));
    else for (const answer of answers) if (!controller.signal.aborted) await answer.run(body, controller.signal);
    const { failed, content, reasoning } = answers[0];
    if (failed || !content) return;
    conversation.messages.push({ role: "user", content: prompt }, { role: "assistant", content, reasoning });
    saveConversation(conversation);
    if (answers.length === 2 && !controller.signal.aborted && !answers[1].failed) row.append(comparison(answers));
  } catch (error) {
    row.replaceChildren(element("p", "failed", error.message));
  } finally {
    setRunning(false);
    offerRegenerate();
    showConversations();
  }
}

/** The node of a turn; its question is kept with it, for "Regenerate". */
function showTurn(prompt, answers) {
  const node = element("div", "turn");
  const row = element("div", "answers");
  row.append(...answers.map((answer) => answer.node));
  node.append(element("p", "question", prompt), row);
  node.dataset.prompt = prompt;
  byId("turns").append(node);
  byId("chat").scrollTop = byId("chat").scrollHeight;
  return node;
}

function comparison([on, off]) {
  const same = on.content === off.content ? "Both answers are the same." : "The answers differ.";
  const [fast, slow] = [on.tokensPerSecond(), off.tokensPerSecond()];
  const times = fast && slow ? ` ${(fast / slow).toFixed(2)} times the tokens per second with speculation.` : "";
  return element("p", "same", same + times);
}

/** A button at the last turn, and at no other. */
function offerRegenerate() {
  for (const old of document.querySelectorAll(".regenerate")) old.remove();
  const last = byId("turns").lastElementChild;
  if (!last) return;
  const again = button("Regenerate", () => {
    const { prompt } = last.dataset;
    const at = conversation.messages.length - 2;
    if (conversation.messages[at]?.content === prompt) conversation.messages.length = at; // unless it had failed
    last.remove();
    turn(prompt);
  });
  again.classList.add("regenerate");
  (last.querySelector(".actions") ?? last).append(again);
}

function setRunning(isRunning) {
  for (const id of ["send", "new"]) byId(id).disabled = isRunning;
  for (const made of document.querySelectorAll(".regenerate, #conversations button")) made.disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("turns").ariaBusy = String(isRunning); // screen readers wait for the whole answer
  if (!isRunning) running = null;
}

function send(event) {
  event.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (!prompt || running) return;
  byId("prompt").value = "";
  turn(prompt);
}

function openConversation(chosen) {
  conversation = chosen;
  byId("turns").replaceChildren();
  for (let at = 0; at + 1 < chosen.messages.length; at += 2) {
    showTurn(chosen.messages[at].content, [Answer.of(chosen.messages[at + 1])]);
  }
  offerRegenerate();
  showConversations();
  openMenu(false);
  byId("prompt").focus();
}

function showConversations() {
  const nodes = savedConversations().map((saved) => {
    const node = element("li");
    const open = button(saved.title, () => openConversation(saved), "open");
    if (saved.id === conversation.id) open.ariaCurrent = "true";
    const remove = button("×", () => {
      deleteConversation(saved.id);
      if (saved.id === conversation.id) openConversation(newConversation());
      else showConversations();
    });
    remove.ariaLabel = `Delete “${saved.title}”`;
    node.append(open, remove);
    return node;
  });
  byId("conversations").replaceChildren(...nodes);
  byId("no-conversations").hidden = nodes.length > 0;
}

function settingChanged(id) {
  if (id === "view") document.body.dataset.view = byId("view").value;
  if (id === "theme") document.documentElement.dataset.theme = byId("theme").value;
}

/** Where there is no room for it, the side panel opens on demand. */
function openMenu(open) {
  document.body.dataset.menu = open ? "open" : "";
  byId("menu").ariaExpanded = String(open);
}

/** Follows an answer that grows, unless the reader has scrolled up. */
function followAnswers() {
  const chat = byId("chat");
  let following = true;
  chat.addEventListener("scroll", () => {
    following = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
  });
  new ResizeObserver(() => following && (chat.scrollTop = chat.scrollHeight)).observe(byId("turns"));
}

byId("composer").addEventListener("submit", send);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.abort();
  openMenu(false);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => openConversation(newConversation()));
byId("menu").addEventListener("click", () => openMenu(document.body.dataset.menu !== "open"));
byId("chat").addEventListener("click", () => openMenu(false));
rememberSettings(settingChanged);
for (const id of ["view", "theme"]) settingChanged(id);
setRunning(false);
showConversations();
followAnswers();
servedModel().catch(() => {}); // the engines' state says what is wrong, and the first turn asks again
watchEngines();
