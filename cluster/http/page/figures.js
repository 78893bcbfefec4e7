// Calculations of the page, without a browser.

/** How many drafts each round accepted, from how its tokens came: the target's own token ends a round. The first token
 * after `begin` belongs to none, it came with the prompt. */
export class Rounds {
  constructor() {
    this.numTokens = 0;
    this.numDrafted = 0;
    this.histogram = []; // [k]: rounds that accepted k drafts
    this.begin();
  }

  begin() {
    this.accepted = 0; // in the round that is not over
    this.isFirst = true;
  }

  push(drafted) {
    this.numTokens += 1;
    const isFirst = this.isFirst;
    this.isFirst = false;
    if (drafted) {
      this.numDrafted += 1;
      this.accepted += 1;
    } else if (!isFirst) {
      this.histogram[this.accepted] = (this.histogram[this.accepted] ?? 0) + 1;
      this.accepted = 0;
    }
  }
}

/** Tokens a round, the target's own included; null without rounds. */
export function acceptanceLength(histogram) {
  let rounds = 0;
  let accepted = 0;
  for (const [k, count] of histogram.entries()) {
    rounds += count ?? 0;
    accepted += k * (count ?? 0);
  }
  return rounds ? 1 + accepted / rounds : null;
}

/** Share of rounds that accepted at least k + 1 drafts, for each k. */
export function perPosition(histogram) {
  const counts = Array.from(histogram, (count) => count ?? 0);
  const rounds = counts.reduce((sum, count) => sum + count, 0);
  return counts.slice(1).map((_, k) => counts.slice(k + 1).reduce((sum, count) => sum + count, 0) / rounds);
}

/** Prometheus' text as a list of {name, labels, value}. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? ([^ ]+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    samples.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return samples;
}

/** The sum of a metric's samples whose labels have these values; null if there is none. */
export function metric(samples, name, labels = {}) {
  const found = samples.filter(
    (sample) => sample.name === name && Object.entries(labels).every(([key, value]) => sample.labels[key] === value),
  );
  return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/** The events of a stream of text pieces, however they are cut: each one's `data`, as text. */
export async function* eventsOf(pieces) {
  let rest = "";
  for await (const piece of pieces) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

/** How an answer ended, if not by itself: {text, canGoOn}; null if it did, or runs.
 * answer: a conversation's. maxModelLen: tokens of prompt and answer together. */
export function endingOf({ finish, content, error, usage }, maxModelLen) {
  const canGoOn = Boolean(content);
  if (finish === "stopped") return { text: "Stopped.", canGoOn };
  if (finish === "failed") return { text: error, canGoOn };
  if (finish !== "length") return null;
  if (usage && usage.total_tokens >= maxModelLen) {
    const length = maxModelLen.toLocaleString("en");
    return { text: `The context of ${length} tokens is full. Edit an earlier message, or start a new chat.`, canGoOn: false };
  }
  const limit = usage ? `the limit of ${usage.completion_tokens.toLocaleString("en")} tokens` : "its limit of tokens";
  if (!content) return { text: `Stopped at ${limit}, while reasoning. Raise “Max tokens”, and regenerate.`, canGoOn };
  return { text: `Stopped at ${limit}.`, canGoOn };
}
