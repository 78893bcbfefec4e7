// Conversations, in the browser's storage: one entry each, so that tabs do not overwrite one another's.
//
// {id, title, updated, version, turns: [{question, pictures?: [data URL], answer?: {content, reasoning, finish, usage}}]}
// updated: milliseconds since 1970. version: grows with each write.
// finish: the API's finish reason, "stopped" by the reader, or "failed". usage: the API's.

import { contentOf } from "./pictures.js";

const PREFIX = "aerie-conversation:";
const FORMER = "aerie-conversations"; // all in one entry
const SNIPPET = 60; // characters shown around what was found

export function newConversation() {
  return { id: newId(), title: "", updated: 0, version: 0, turns: [] };
}

const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

/** storage: `localStorage`, or what has its methods. */
export class Conversations {
  constructor(storage) {
    this.storage = storage;
    this.convertFormer();
  }

  /** All conversations, newest first. */
  all() {
    const found = keysOf(this.storage).map((key) => this.read(key.slice(PREFIX.length)));
    return found.filter(Boolean).sort((one, other) => other.updated - one.updated);
  }

  /** The conversation as it is stored; null if it is not. */
  read(id) {
    try {
      const found = JSON.parse(this.storage.getItem(PREFIX + id));
      return Array.isArray(found?.turns) ? found : null;
    } catch {
      return null; // not ours, or no storage in this browser
    }
  }

  /** Store `conversation`, under a new id if another tab has written it meanwhile: both are kept then. Returns whether
   * the browser had room. */
  save(conversation, updated = Date.now()) {
    if (!conversation.turns.length) return true;
    conversation.title ||= conversation.turns[0].question.slice(0, 80);
    const stored = this.read(conversation.id);
    if (stored && stored.version !== conversation.version) conversation.id = newId();
    conversation.version += 1;
    conversation.updated = updated;
    try {
      this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
  }

  convertFormer() {
    try {
      for (const { id, title, messages } of JSON.parse(this.storage.getItem(FORMER)) ?? []) {
        const conversation = { ...newConversation(), id, title };
        for (let at = 0; at + 1 < messages.length; at += 2) {
          const { content, reasoning = "" } = messages[at + 1];
          conversation.turns.push({ question: messages[at].content, answer: { content, reasoning, finish: "stop" } });
        }
        if (!this.read(id) && !this.save(conversation)) return; // no room: they stay as they are
      }
      this.storage.removeItem(FORMER);
    } catch {
      // not ours, or no storage in this browser
    }
  }
}

/** The id of the conversation that a storage event is about; null for other entries. */
export function changedId(key) {
  return key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
}

function keysOf(storage) {
  try {
    const keys = Array.from({ length: storage.length }, (_, at) => storage.key(at));
    return keys.filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

/** The turns as messages of the API. A turn without an answer is left out: roles must alternate. */
export function messagesOf(turns) {
  return turns
    .filter(({ answer }) => answer?.content)
    .flatMap((turn) => [
      { role: "user", content: contentOf(turn) },
      { role: "assistant", content: turn.answer.content },
    ]);
}

/** Where `words` are found, all of them, in any case: a piece of the text around the first; "" if only in the title.
 * null if one is missing. */
export function found(conversation, words) {
  const texts = conversation.turns.flatMap(({ question, answer }) => [question, answer?.content ?? ""]);
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const whole = [conversation.title, ...texts].join("\n").toLowerCase();
  if (!wanted.every((word) => whole.includes(word))) return null;
  for (const text of wanted.length ? texts : []) {
    const at = text.toLowerCase().indexOf(wanted[0]);
    if (at < 0) continue;
    const begin = Math.max(0, at - SNIPPET / 2);
    const end = at + wanted[0].length + SNIPPET / 2;
    const piece = text.slice(begin, end).replace(/\s+/g, " ");
    return `${begin > 0 ? "…" : ""}${piece}${end < text.length ? "…" : ""}`;
  }
  return "";
}
