// Joins the parts: asks, shows the conversation, and keeps it.

import { forgetModel, modelCard } from "./api.js";
import { changedId, Conversations, messagesOf, newConversation } from "./conversations.js";
import { lookNow, watchEngines } from "./engines.js";
import { contentOf, Pictures } from "./pictures.js";
import { parameters, rememberSettings, showDefaults, systemMessages } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { toast } from "./toast.js";
import { TurnView } from "./turns.js";

const byId = (id) => document.getElementById(id);
const conversations = new Conversations(localStorage);
let conversation = newConversation();
let views = []; // of its turns
let running = null; // {controller, view, conversation} of the answer under way
let isGone = false; // the server
let hasDrafts = false;
let isLeaving = false; // the page is being closed
let maxModelLen = Infinity; // tokens of the context; unknown at first
const scrollToEnd = followAnswers();
const pictures = new Pictures(byId("pictures"), toast);

const sidebar = new Sidebar(conversations, {
  current: () => conversation,
  open: openConversation,
  closed: () => openConversation(newConversation()),
});

async function showModel() {
  const card = await modelCard();
  byId("model").textContent = card.id;
  maxModelLen = card.max_model_len;
  showDefaults(card);
  showContext();
  return card;
}

/** Asks `question`, with pictures, after the turns so far. */
async function ask(question, isRace = false, shown = []) {
  const turn = shown.length ? { question, pictures: shown } : { question };
  conversation.turns.push(turn);
  const view = showTurn(turn);
  const made = view.showNew(isRace, byId("mode").value === "on");
  await answered(view, made, async (signal) => {
    const messages = [...systemMessages(), ...messagesOf(conversation.turns.slice(0, -1))];
    const card = await showModel();
    const body = { model: card.id, messages: [...messages, { role: "user", content: contentOf(turn) }], ...parameters() };
    await made.run(body, signal, maxModelLen);
    turn.race = made.result;
  });
}

/** Goes on with the last answer, where it stopped. */
async function goOn() {
  const view = views.at(-1);
  await answered(view, view.answer, async (signal) => {
    const card = await showModel();
    const messages = [...systemMessages(), ...messagesOf(conversation.turns)];
    const continued = { add_generation_prompt: false, continue_final_message: true };
    const body = { model: card.id, messages, ...continued, ...parameters() };
    await view.answer.run(body, signal, maxModelLen);
  });
}

/** Does `work(signal)`, which fetches the answer of the last turn; keeps the conversation before and after. */
async function answered(view, made, work) {
  const controller = new AbortController();
  running = { controller, view, conversation };
  if (made === view.answer) made.onChange = () => showContext(); // a race shows its speeds instead
  keep();
  showRunning();
  focusPrompt();
  try {
    await work(controller.signal);
  } catch (error) { // the model's name could not be had
    view.answer.fail(error);
    view.answer.showEnding(maxModelLen);
  }
  if (view.answer.gone && isLeaving) view.answer.finish = "stopped"; // the browser broke the connection off
  else if (view.answer.gone) lookNow();
  view.turn.answer = view.answer.record();
  keep(running.conversation);
  running = null;
  showRunning();
  focusPrompt();
}

/** After a button that is gone or disabled now. On a touch screen it would open the keyboard. */
function focusPrompt() {
  if (document.activeElement === document.body && !matchMedia("(pointer: coarse)").matches) byId("prompt").focus();
}

/** Keeps `kept`, and what there is of an answer under way. */
function keep(kept = conversation) {
  if (!conversations.save(kept)) toast("Not kept: the browser has no room. Delete or export conversations.");
  sidebar.show();
}

function keepUnfinished() {
  if (!running) return;
  running.view.turn.answer = running.view.answer.record();
  conversations.save(running.conversation);
}

function showTurn(turn) {
  const view = new TurnView(turn, (text) => {
    rewind(views.indexOf(view));
    ask(text, false, turn.pictures);
  });
  views.push(view);
  byId("turns").append(view.node);
  scrollToEnd();
  return view;
}

/** Takes back the turns from `at` on, until the reader wants them again. */
function rewind(at) {
  const changed = conversation;
  const before = [...changed.turns];
  changed.turns.length = at;
  for (const view of views.splice(at)) view.node.remove();
  toast(before.length - at > 1 ? "The messages after it were removed." : "The former answer was removed.", () => {
    running?.controller.abort();
    changed.turns = before;
    keep(changed);
    openConversation(changed);
  });
}

function again(isRace) {
  const { question, pictures: shown } = conversation.turns.at(-1);
  rewind(conversation.turns.length - 1);
  ask(question, isRace, shown);
}

/** What may be done now; the last turn, and no other, offers to change its answer. */
function showRunning() {
  const isRunning = Boolean(running);
  for (const id of ["send", "race"]) byId(id).disabled = isRunning || isGone;
  byId("new").disabled = isRunning;
  byId("stop").hidden = !isRunning;
  document.body.dataset.running = isRunning ? "yes" : "";
  byId("turns").ariaBusy = String(isRunning); // screen readers wait for the whole answer
  byId("welcome").hidden = views.length > 0;
  for (const view of views) view.offer(isRunning || view !== views.at(-1) ? {} : offers(view.answer));
  for (const made of document.querySelectorAll(".edit, .offered, #conversations button")) {
    made.disabled = isRunning || (isGone && made.matches(".edit, .offered"));
  }
  showContext();
}

function offers({ canGoOn, finish }) {
  const actions = canGoOn ? { "Go on": goOn } : {};
  actions[finish === "failed" ? "Try again" : "Regenerate"] = () => again(false);
  if (hasDrafts) actions.Race = () => again(true);
  return actions;
}

/** How much of the context the conversation takes, as the server last counted it. */
function showContext() {
  const used = views.findLast((view) => view.answer?.usage)?.answer.usage.total_tokens ?? 0;
  const meter = byId("context");
  meter.hidden = !used || maxModelLen === Infinity;
  if (meter.hidden) return;
  const text = `${used.toLocaleString("en")} of ${maxModelLen.toLocaleString("en")} tokens`;
  Object.assign(meter, { ariaValueMax: String(maxModelLen), ariaValueNow: String(used), ariaValueText: text });
  meter.querySelector(".fill").style.width = `${Math.min(100, (100 * used) / maxModelLen)}%`;
  meter.dataset.nearlyFull = used > 0.8 * maxModelLen ? "yes" : "";
  byId("context-text").textContent = text;
}

function send(isRace) {
  const question = byId("prompt").value.trim();
  if (!question || running || isGone) return;
  byId("prompt").value = "";
  ask(question, isRace, pictures.take());
}

function openConversation(chosen) {
  conversation = chosen;
  views = [];
  byId("turns").replaceChildren();
  for (const turn of chosen.turns) showTurn(turn).showStored(maxModelLen);
  showRunning();
  sidebar.show();
  openMenu(false);
  byId("prompt").focus();
}

/** Another tab has written: its list here too, and its text if it is the conversation that is open and idle. */
function changedElsewhere({ key, storageArea }) {
  if (storageArea !== localStorage) return;
  sidebar.show();
  const id = changedId(key);
  const isBusy = running || document.querySelector(".editing");
  const stored = id === conversation.id && !isBusy ? conversations.read(id) : null;
  if (!stored) return;
  const [text, focus] = [byId("prompt").value, document.activeElement];
  openConversation(stored);
  byId("prompt").value = text;
  focus?.focus();
}

function engineState(engines) {
  const [wasGone, hadDrafts] = [isGone, hasDrafts];
  isGone = engines.state === "gone";
  hasDrafts = engines.hasDrafts ?? hasDrafts;
  document.body.dataset.drafts = hasDrafts ? "yes" : "";
  if (isGone && !wasGone) {
    const since = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    byId("gone").textContent =
      `The server has not answered since ${since}. What you write stays here; you can send it when the server is back.`;
  }
  byId("gone").hidden = !isGone;
  if (wasGone && !isGone) {
    forgetModel();
    byId("model").textContent = "";
    toast("The server is back.");
  }
  if (!isGone && !byId("model").textContent) showModel().catch(() => {}); // the state says what is wrong
  if (wasGone !== isGone || hadDrafts !== hasDrafts) showRunning();
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

/** Follows an answer that grows, unless the reader has scrolled up; returns what scrolls to the end. */
function followAnswers() {
  const chat = byId("chat");
  let [following, lastTop] = [true, 0];
  const toEnd = () => {
    following = true;
    chat.scrollTop = chat.scrollHeight;
  };
  chat.addEventListener("scroll", () => {
    const isAtEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
    following = isAtEnd || (following && chat.scrollTop >= lastTop);
    lastTop = chat.scrollTop;
  });
  new ResizeObserver(() => following && toEnd()).observe(byId("turns"));
  return toEnd;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(false);
});
byId("race").addEventListener("click", () => send(true));
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send((event.ctrlKey || event.metaKey) && hasDrafts);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.controller.abort();
  openMenu(false);
});
byId("stop").addEventListener("click", () => running?.controller.abort());
byId("new").addEventListener("click", () => openConversation(newConversation()));
byId("menu").addEventListener("click", () => openMenu(document.body.dataset.menu !== "open"));
byId("chat").addEventListener("click", () => openMenu(false));
window.addEventListener("storage", changedElsewhere);
window.addEventListener("beforeunload", () => {
  isLeaving = true;
  setTimeout(() => (isLeaving = false), 1000); // if the page stays after all
});
window.addEventListener("pagehide", keepUnfinished);
document.addEventListener("visibilitychange", () => document.hidden && keepUnfinished());
rememberSettings(settingChanged);
for (const id of ["view", "theme"]) settingChanged(id);
showRunning();
sidebar.show();
watchEngines(engineState);
