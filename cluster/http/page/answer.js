// One answer: its text, its tokens by how they came, its reasoning, its figures.

import { streamChat } from "./api.js";
import { copyButton, element } from "./element.js";
import { acceptanceLength, perPosition, Rounds } from "./figures.js";
import { MarkdownView } from "./markdown.js";

export class Answer {
  constructor(speculative) {
    this.speculative = speculative;
    this.content = ""; // for the history
    this.reasoning = "";
    this.failed = false;
    this.rounds = new Rounds();
    this.node = element("article", "answer");
    this.node.dataset.speculative = String(speculative);
    this.figures = element("p", "figures", "…");
    this.markdown = new MarkdownView();
    this.tokens = element("p", "tokens");
    this.thoughts = new MarkdownView();
    this.folded = element("details", "reasoning");
    this.folded.hidden = true;
    this.folded.append(element("summary", "", "Reasoning"), this.thoughts.node);
    this.text = element("div", "text");
    this.text.append(this.folded, this.markdown.node);
    this.actions = element("div", "actions");
    this.actions.append(copyButton(() => this.content));
    this.node.append(this.figures, this.text, this.tokens, this.actions);
  }

  /** An answer of the history: its text alone. */
  static of({ content, reasoning = "" }) {
    const answer = new Answer(true);
    Object.assign(answer, { content, reasoning });
    answer.node.classList.add("text-only");
    answer.figures.remove();
    answer.showText();
    return answer;
  }

  /** A heading, where an answer stands beside another. */
  head(title) {
    this.node.prepend(element("h3", "", title));
  }

  /** Fetches the answer to `body` and shows it; never throws. */
  async run(body, signal) {
    this.startMs = performance.now();
    try {
      for await (const chunk of streamChat({ ...body, speculative: this.speculative }, signal)) this.push(chunk);
    } catch (error) {
      this.failed = error.name !== "AbortError";
      this.node.append(element("p", "failed", this.failed ? error.message : "(stopped)"));
    }
    this.showText();
    this.node.dataset.done = "true";
  }

  push(chunk) {
    const choice = chunk.choices[0];
    this.content += choice?.delta.content ?? "";
    this.reasoning += choice?.delta.reasoning_content ?? "";
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
      this.tokens.append(element("span", drafted ? "token drafted" : "token target", text));
    }
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    // Once a frame, however many chunks come in one.
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.showText();
    });
  }

  showText() {
    this.folded.hidden = !this.reasoning;
    if (this.reasoning) this.thoughts.show(this.reasoning);
    this.markdown.show(this.content);
    if (this.startMs !== undefined) this.showFigures();
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
