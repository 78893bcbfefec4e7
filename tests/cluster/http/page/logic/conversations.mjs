import assert from "node:assert/strict";
import test from "node:test";
import { changedId, Conversations, found, messagesOf, newConversation } from "./page/conversations.js";
import { asJson, asMarkdown, fileName } from "./page/export.js";

/** The methods of localStorage, with room for `room` characters. */
class Storage {
  constructor(room = Infinity) {
    this.entries = new Map();
    this.room = room;
  }
  get length() {
    return this.entries.size;
  }
  key(at) {
    return Array.from(this.entries.keys())[at] ?? null;
  }
  getItem(key) {
    return this.entries.get(key) ?? null;
  }
  setItem(key, value) {
    if (value.length > this.room) throw new Error("QuotaExceededError");
    this.entries.set(key, value);
  }
  removeItem(key) {
    this.entries.delete(key);
  }
}

const turn = (question, content, more = {}) => ({ question, answer: { content, reasoning: "", finish: "stop", ...more } });
const made = (...turns) => ({ ...newConversation(), turns });

test("conversations are kept one by one, newest first", () => {
  const tabs = [new Storage()].flatMap((storage) => [new Conversations(storage), new Conversations(storage)]);
  const [one, two] = [made(turn("first", "a")), made(turn("second", "b"))];
  tabs[0].save(one, 1);
  tabs[1].save(two, 2); // a tab that has not read the first one does not overwrite it
  assert.deepEqual(tabs[0].all().map(({ title }) => title), ["second", "first"]);
  tabs[0].remove(two.id);
  assert.deepEqual(tabs[1].all(), [one]);
});

test("two tabs that go on with one conversation lose nothing", () => {
  const conversations = new Conversations(new Storage());
  const original = made(turn("q", "a"));
  conversations.save(original);
  const [here, there] = [conversations.read(original.id), conversations.read(original.id)];
  there.turns.push(turn("there", "b"));
  conversations.save(there);
  here.turns.push(turn("here", "c"));
  conversations.save(here);
  assert.notEqual(here.id, there.id);
  const questions = conversations.all().map(({ turns }) => turns.map(({ question }) => question).join(" "));
  assert.deepEqual(questions.sort(), ["q here", "q there"]);
  here.turns.push(turn("more", "d"));
  conversations.save(here); // and each goes on by itself
  assert.equal(conversations.all().length, 2);
});

test("a conversation that another tab deleted is kept when it goes on", () => {
  const conversations = new Conversations(new Storage());
  const open = made(turn("q", "a"));
  conversations.save(open);
  conversations.remove(open.id);
  open.turns.push(turn("more", "b"));
  assert.ok(conversations.save(open));
  assert.equal(conversations.read(open.id).turns.length, 2);
});

test("deleting is undone with its place in the list", () => {
  const conversations = new Conversations(new Storage());
  const [old, young] = [made(turn("old", "a")), made(turn("young", "b"))];
  conversations.save(old, 1);
  conversations.save(young, 2);
  conversations.remove(old.id);
  conversations.save(old, old.updated);
  assert.deepEqual(conversations.all().map(({ title }) => title), ["young", "old"]);
});

test("a browser without room says so, and keeps what it has", () => {
  const conversations = new Conversations(new Storage(300));
  const small = made(turn("small", "a"));
  assert.ok(conversations.save(small));
  assert.equal(conversations.save(made(turn("large", "b".repeat(300)))), false);
  assert.deepEqual(conversations.all().map(({ title }) => title), ["small"]);
});

test("the former list is taken over, and foreign entries are left alone", () => {
  const storage = new Storage();
  const messages = [{ role: "user", content: "q" }, { role: "assistant", content: "a", reasoning: "r" }];
  storage.setItem("aerie-conversations", JSON.stringify([{ id: "1-2", title: "t", messages }]));
  storage.setItem("aerie-conversation:x", "no JSON");
  storage.setItem("other", "1");
  const [taken, ...others] = new Conversations(storage).all();
  assert.deepEqual([taken.id, taken.title, others.length], ["1-2", "t", 0]);
  assert.deepEqual(taken.turns, [{ question: "q", answer: { content: "a", reasoning: "r", finish: "stop" } }]);
  assert.deepEqual(Array.from(storage.entries.keys()).sort(), ["aerie-conversation:1-2", "aerie-conversation:x", "other"]);
  assert.equal(changedId("aerie-conversation:1-2"), "1-2");
  assert.equal(changedId("other"), null);
  assert.equal(changedId(null), null);
});

test("without storage there are no conversations, and no exception", () => {
  const none = new Proxy({}, { get: () => { throw new Error("SecurityError"); } });
  const conversations = new Conversations(none);
  assert.deepEqual(conversations.all(), []);
  assert.equal(conversations.save(made(turn("q", "a"))), false);
});

test("a turn without an answer is no part of the next prompt", () => {
  const turns = [turn("a", "b"), { question: "c" }, turn("d", "", { finish: "failed" }), turn("e", "f")];
  assert.deepEqual(messagesOf(turns).map(({ content }) => content), ["a", "b", "e", "f"]);
});

test("search finds words in titles, questions and answers", () => {
  const talk = { ...made(turn("About Falcons", "They are " + "fast ".repeat(40) + "birds of prey.")), title: "About Falcons" };
  assert.equal(found(talk, ""), "");
  assert.equal(found(talk, "falcons BIRDS"), "About Falcons");
  assert.match(found(talk, "prey"), /^….*birds of prey\.$/);
  assert.equal(found(talk, "falcons owls"), null);
});

test("exported Markdown and JSON", () => {
  const talk = made(turn("Why?", "Because **so**.", { reasoning: "hm" }), { question: "open" });
  Object.assign(talk, { title: "Why?\nnow", updated: 0 });
  const markdown = "# Why? now\n\n## Question\n\nWhy?\n\n## Reasoning\n\nhm\n\n## Answer\n\nBecause **so**.\n\n## Question\n\nopen\n";
  assert.equal(asMarkdown(talk), markdown);
  const [exported] = JSON.parse(asJson([talk])).conversations;
  assert.equal(exported.updated, "1970-01-01T00:00:00.000Z");
  assert.deepEqual(exported.messages, [
    { role: "user", content: "Why?" },
    { role: "assistant", content: "Because **so**.", reasoning_content: "hm" },
  ]);
  assert.equal(fileName("Wie geht’s, Ärzte?", "md"), "wie-geht-s-ärzte.md");
  assert.equal(fileName("???", "json"), "conversation.json");
});

test("pictures stand before the question, also in later turns", () => {
  const turns = [{ ...turn("what?", "a cat"), pictures: ["data:a", "data:b"] }, turn("sure?", "yes")];
  const [first, , second] = messagesOf(turns);
  assert.deepEqual(first.content.map(({ type }) => type), ["image_url", "image_url", "text"]);
  assert.deepEqual(first.content[1], { type: "image_url", image_url: { url: "data:b" } });
  assert.equal(first.content[2].text, "what?");
  assert.equal(second.content, "sure?");
});
