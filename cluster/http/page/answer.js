// One answer: its tokens as they come, coloured by how they came, and its figures.

import { streamChat } from "./api.js";
import { acceptanceLength, perPosition, Rounds } from "./figures.js";

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Answer {
  constructor(speculative) {
    this.speculative = speculative;
    this.content = ""; // for the history
    this.failed = false;
    this.rounds = new Rounds();
    this.node = element("article", "answer");
    this.node.dataset.speculative = String(speculative);
    this.text = element("p", "text");
    this.figures = element("p", "figures", "…");
    this.node.append(element("h3", "", speculative ? "Speculation on" : "Speculation off"), this.figures, this.text);
  }

  /** Fetches the answer to `body` and shows it; never throws. */
  async run(body, signal) {
    this.startMs = performance.now();
    try {
      for await (const chunk of streamChat({ ...body, speculative: this.speculative }, signal)) this.push(chunk);
    } catch (error) {
      this.failed = error.name !== "AbortError";
      this.text.append(element("span", "failed", this.failed ? ` ${error.message}` : " (stopped)"));
    }
    this.node.dataset.done = "true";
  }

  push(chunk) {
    const choice = chunk.choices[0];
    if (choice?.delta.content) this.content += choice.delta.content;
    const origins = choice?.token_origins ?? [];
    if (origins.length) {
      this.lastMs = performance.now();
      if (this.firstMs === undefined) {
        this.firstMs = this.lastMs;
        this.numFirst = origins.length;
      }
    }
    for (const { text, drafted } of origins) {
      this.rounds.push(drafted);
      this.text.append(element("span", drafted ? "token drafted" : "token target", text));
    }
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    this.showFigures();
  }

  /** Of the text after its first event; null while there is none. */
  tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.rounds.numTokens - this.numFirst) / seconds : null;
  }

  showFigures() {
    const parts = [`${this.rounds.numTokens} tokens`];
    const rate = this.tokensPerSecond();
    if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
    if (this.firstMs !== undefined) parts.push(`first after ${Math.round(this.firstMs - this.startMs)} ms`);
    const histogram = this.metrics?.acceptance_histogram ?? this.rounds.histogram;
    const length = acceptanceLength(histogram);
    if (this.speculative && length !== null) {
      const shares = perPosition(histogram).map((share) => `${Math.round(100 * share)} %`);
      parts.push(`${length.toFixed(2)} tokens a round`);
      if (shares.length) parts.push(`accepted by position: ${shares.join(", ")}`);
    }
    this.figures.textContent = parts.join(" · ");
  }
}
