// Conversations in localStorage: what was asked and answered, newest first. Nothing leaves the browser.

const KEY = "aerie-conversations";
const MAX_CONVERSATIONS = 50;

export function savedConversations() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return []; // not ours, or no storage in this browser
  }
}

/** {id, title, messages: [{role, content, reasoning?}]}; a title is the first question. */
export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] };
}

/** Keeps `conversation` as the newest. The oldest go where the browser has no room for all. */
export function saveConversation(conversation) {
  if (!conversation.messages.length) return;
  conversation.title ||= conversation.messages[0].content.slice(0, 80);
  let kept = [conversation, ...savedConversations().filter((other) => other.id !== conversation.id)];
  kept = kept.slice(0, MAX_CONVERSATIONS);
  while (kept.length && !stored(kept)) kept.pop();
}

export function deleteConversation(id) {
  stored(savedConversations().filter((other) => other.id !== id));
}

function stored(conversations) {
  try {
    localStorage.setItem(KEY, JSON.stringify(conversations));
    return true;
  } catch {
    return false;
  }
}
