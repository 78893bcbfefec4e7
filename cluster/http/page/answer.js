// One answer: its text, its tokens by how they came, its reasoning, its figures, how it ended.

import { GoneError, streamChat } from "./api.js";
import { copyButton, element } from "./element.js";
import { acceptanceLength, endingOf, perPosition, Rounds } from "./figures.js";
import { MarkdownView } from "./markdown.js";

export class Answer {
  constructor(speculative = true) {
    this.speculative = speculative;
    this.content = "";
    this.reasoning = "";
    this.finish = null; // see conversations.js
    this.error = undefined;
    this.usage = undefined;
    this.gone = false; // whether it ended because the server went
    this.onChange = () => {}; // called at most once a frame
    this.rounds = new Rounds();
    this.arrivals = []; // of the last run: {ms since its start, number of tokens so far}
    this.timedTokens = 0; // of former runs, after the first event of each
    this.timedMs = 0;
    this.numRuns = 0;
    this.build();
  }

  build() {
    this.node = element("article", "answer");
    this.node.dataset.speculative = String(this.speculative);
    this.figures = element("p", "figures", "…");
    this.markdown = new MarkdownView();
    this.tokens = element("p", "tokens");
    this.thoughts = new MarkdownView();
    this.folded = element("details", "reasoning");
    this.folded.hidden = true;
    this.folded.append(element("summary", "", "Reasoning"), this.thoughts.node);
    this.text = element("div", "text");
    this.text.append(this.folded, this.markdown.node);
    this.ending = element("p", "ending");
    this.ending.hidden = true;
    this.actions = element("div", "actions");
    this.actions.append(copyButton(() => this.content));
    this.node.append(this.figures, this.text, this.tokens, this.ending, this.actions);
  }

  /** An answer of the history: its text alone. */
  static of(record, maxModelLen) {
    const answer = new Answer();
    Object.assign(answer, record);
    answer.node.classList.add("text-only");
    answer.figures.remove();
    answer.showText();
    answer.showEnding(maxModelLen);
    return answer;
  }

  /** For the conversation. */
  record() {
    const { content, reasoning, usage } = this;
    const finish = this.finish ?? "stopped";
    return { content, reasoning, finish, usage, error: finish === "failed" ? this.error : undefined };
  }

  /** A heading, where an answer stands beside another. */
  head(title) {
    this.node.prepend(element("h2", "lane", title));
  }

  /** Fetches the answer to `body`, or what follows its text so far, and shows it; never throws. */
  async run(body, signal, maxModelLen) {
    delete this.node.dataset.done;
    Object.assign(this, { finish: null, error: undefined, gone: false, firstMs: undefined, lastMs: undefined });
    this.ending.hidden = true;
    this.rounds.begin();
    this.arrivals = [];
    this.numRuns += 1;
    this.startMs = performance.now();
    try {
      for await (const chunk of streamChat({ ...body, speculative: this.speculative }, signal)) this.push(chunk);
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else this.fail(error);
    }
    this.showText();
    this.showEnding(maxModelLen);
    this.timedTokens += this.lastTimedTokens();
    this.timedMs += this.lastTimedMs();
    this.firstMs = undefined;
  }

  fail(error) {
    this.finish = "failed";
    this.error = error.message;
    this.gone = error instanceof GoneError;
  }

  push(chunk) {
    const choice = chunk.choices[0];
    this.content += choice?.delta.content ?? "";
    this.reasoning += choice?.delta.reasoning_content ?? "";
    this.finish = choice?.finish_reason ?? this.finish;
    this.usage = chunk.usage ?? this.usage;
    const origins = choice?.token_origins ?? [];
    for (const { text, drafted } of origins) {
      this.rounds.push(drafted);
      this.tokens.append(element("span", drafted ? "token drafted" : "token target", text));
    }
    if (origins.length) {
      this.lastMs = performance.now();
      if (this.firstMs === undefined) {
        this.firstMs = this.lastMs;
        this.numFirst = this.rounds.numTokens;
      }
      this.arrivals.push({ ms: this.lastMs - this.startMs, numTokens: this.rounds.numTokens });
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
    this.onChange();
  }

  showEnding(maxModelLen) {
    const ending = endingOf(this, maxModelLen);
    this.canGoOn = ending?.canGoOn ?? false;
    this.ending.hidden = !ending;
    this.ending.classList.toggle("failed", this.finish === "failed");
    this.ending.textContent = ending?.text ?? "";
    this.node.dataset.done = "true";
  }

  lastTimedMs() {
    return this.firstMs === undefined ? 0 : this.lastMs - this.firstMs;
  }

  lastTimedTokens() {
    return this.firstMs === undefined ? 0 : this.rounds.numTokens - this.numFirst;
  }

  /** Of the text after its first event; null while there is none. */
  tokensPerSecond() {
    const seconds = (this.timedMs + this.lastTimedMs()) / 1000;
    return seconds > 0 ? (this.timedTokens + this.lastTimedTokens()) / seconds : null;
  }

  showFigures() {
    const parts = [`${this.rounds.numTokens} tokens`];
    const rate = this.tokensPerSecond();
    if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
    if (this.arrivals.length) parts.push(`first after ${Math.round(this.arrivals[0].ms)} ms`);
    // The server's counts are exact, but of one request.
    const histogram = (this.numRuns === 1 && this.metrics?.acceptance_histogram) || this.rounds.histogram;
    const length = acceptanceLength(histogram);
    if (this.speculative && length !== null) {
      const shares = perPosition(histogram).map((share) => `${Math.round(100 * share)} %`);
      parts.push(`${length.toFixed(2)} tokens a round`);
      if (shares.length) parts.push(`accepted by position: ${shares.join(", ")}`);
    }
    this.figures.textContent = parts.join(" · ");
  }
}
