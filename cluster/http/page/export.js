// Conversations as files.

import { messagesOf } from "./conversations.js";

export function asMarkdown({ title, turns }) {
  const parts = [`# ${title.replace(/\s+/g, " ")}`];
  for (const { question, answer } of turns) {
    parts.push("## Question", question);
    if (answer?.reasoning) parts.push("## Reasoning", answer.reasoning);
    if (answer?.content) parts.push("## Answer", answer.content);
  }
  return parts.map((part) => part.trim()).join("\n\n") + "\n";
}

/** JSON with messages as the API takes them; the reasoning beside them, as the API gives it. */
export function asJson(conversations) {
  const shown = conversations.map(({ title, updated, turns }) => {
    const answers = turns.filter(({ answer }) => answer?.content).map(({ answer }) => answer);
    const messages = messagesOf(turns);
    for (const [at, { reasoning }] of answers.entries()) {
      if (reasoning) messages[2 * at + 1].reasoning_content = reasoning;
    }
    return { title, updated: new Date(updated).toISOString(), messages };
  });
  return JSON.stringify({ conversations: shown }, null, 2) + "\n";
}

/** A name for a file of this title: letters, digits and hyphens. */
export function fileName(title, ending) {
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
  return `${name.slice(0, 60).replace(/^-+|-+$/g, "") || "conversation"}.${ending}`;
}

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
