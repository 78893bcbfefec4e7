// The server's HTTP API. Where it wants a key, the key is asked for once and kept in sessionStorage.

import { eventsOf } from "./figures.js";

const KEY = "aerie-api-key";
const STREAM = {
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
  return_token_origins: true,
};
const BROKEN = "The connection to the server broke off.";
let asking = null; // the promise of a key that the user is being asked for

function askForKey() {
  if (asking) return asking;
  const dialog = document.getElementById("key-dialog");
  const form = document.getElementById("key-form");
  const input = document.getElementById("key");
  asking = new Promise((resolve) => {
    const submit = (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!key) return;
      sessionStorage.setItem(KEY, key);
      input.value = "";
      form.removeEventListener("submit", submit);
      dialog.close();
      asking = null;
      resolve();
    };
    form.addEventListener("submit", submit);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

/** The server cannot be reached, or the connection to it broke off. */
export class GoneError extends Error {}

/** `fetch` with the key; asks for another one while the server refuses it. Throws GoneError without a reply, and an Error with
 * the server's message for any other failure, but for the statuses in `allowed`. */
export async function request(path, options = {}, allowed = []) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const reply = await reached(fetch(path, { ...options, headers }), "The server does not answer.");
    if (reply.status === 401) {
      if (key === sessionStorage.getItem(KEY)) await askForKey(); // else another request has just got a new one
      continue;
    }
    if (reply.ok || allowed.includes(reply.status)) return reply;
    throw new Error(await messageOf(reply));
  }
}

/** What a fetch or a read gives. Browsers say with a TypeError that there is no connection. */
async function reached(promise, message) {
  try {
    return await promise;
  } catch (error) {
    if (error instanceof TypeError || error.name === "TimeoutError") throw new GoneError(message);
    throw error;
  }
}

async function messageOf(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${reply.status} ${text.slice(0, 200)}`;
  }
}

/** The chunks of a streamed chat. Throws an Error if it fails, at once or on its way. */
export async function* streamChat(body, signal) {
  const reply = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, ...STREAM }),
    signal,
  });
  for await (const event of eventsOf(textOf(reply.body))) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new GoneError(BROKEN);
}

async function* textOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reached(reader.read(), BROKEN);
    if (done) return;
    yield value;
  }
}

let card = null;

/** The served model: its entry in /v1/models. */
export async function modelCard() {
  card ??= (await (await request("v1/models")).json()).data[0];
  return card;
}

/** A server that returns may serve another model. */
export function forgetModel() {
  card = null;
}
