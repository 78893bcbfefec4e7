// A race: the same prompt with and without drafts, one after the other, so that each has the engine to itself. A replay
// then shows both at once, as they came.

import { Answer } from "./answer.js";
import { button, element } from "./element.js";

const LANES = ["With drafts", "Without drafts"];
const MIN_TOKENS = 16; // after the first ones: fewer say more of the connection than of the engine

export class Race {
  constructor() {
    this.board = new Board();
    this.answers = [new Answer(true), new Answer(false)];
    for (const [lane, answer] of this.answers.entries()) {
      answer.head(LANES[lane]);
      answer.onChange = () => this.board.show(this.speeds());
    }
    const columns = element("div", "answers");
    columns.append(...this.answers.map((answer) => answer.node));
    this.node = element("div", "race");
    this.node.append(this.board.node, columns);
  }

  /** The answer that the conversation goes on with. */
  get answer() {
    return this.answers[0];
  }

  speeds() {
    return this.answers.map((answer) => answer.tokensPerSecond());
  }

  async run(body, signal, maxModelLen) {
    for (const [lane, answer] of this.answers.entries()) {
      this.board.running(lane);
      await answer.run(body, signal, maxModelLen);
      if (answer.finish === "failed" || answer.finish === "stopped") break;
    }
    this.board.running(null);
    for (const answer of this.answers) answer.onChange = () => {}; // to go on is no part of the race
    this.result = resultOf(this.answers);
    if (!this.result) return;
    this.board.finish(this.result);
    this.board.note.append(" ", button("Replay side by side", () => this.replay()));
  }

  replay() {
    cancelAnimationFrame(this.frame);
    const begin = performance.now();
    const step = () => {
      const ms = performance.now() - begin;
      const shares = this.answers.map((answer) => shownAt(answer, ms));
      this.board.progress(shares);
      if (shares.some((share) => share < 1)) this.frame = requestAnimationFrame(step);
      else this.board.show(this.result.speeds);
    };
    step();
  }
}

/** Show the tokens that had come after `ms`; return their share. */
function shownAt({ arrivals, tokens }, ms) {
  const total = arrivals.at(-1).numTokens;
  const count = arrivals.findLast((arrival) => arrival.ms <= ms)?.numTokens ?? 0;
  for (const [at, token] of Array.from(tokens.children).entries()) token.classList.toggle("to-come", at >= count && at < total);
  return count / total;
}

/** {speeds, same, isShort}, for the board and the conversation; undefined if one did not get so far. */
export function resultOf(answers) {
  const speeds = answers.map((answer) => answer.tokensPerSecond());
  const over = answers.every(({ finish }) => finish && finish !== "failed" && finish !== "stopped");
  if (!over || speeds.some((speed) => !speed)) return undefined;
  const isShort = answers.some(({ timedTokens }) => timedTokens < MIN_TOKENS);
  return { speeds, same: answers[0].content === answers[1].content, isShort };
}

/** Both speeds as bars, and their factor. */
export class Board {
  constructor() {
    this.node = element("div", "board");
    this.lanes = LANES.map((name) => {
      const [track, fill, speed] = [element("div", "track"), element("div", "fill"), element("span", "speed", "–")];
      track.append(fill);
      return { name: element("span", "name", name), track, fill, speed };
    });
    const lanes = element("div", "lanes");
    lanes.append(...this.lanes.flatMap(({ name, track, speed }) => [name, track, speed]));
    this.factor = element("p", "factor");
    this.note = element("p", "note");
    this.node.append(lanes, this.factor, this.note);
    this.running(null);
  }

  static of(result) {
    const board = new Board();
    board.show(result.speeds);
    board.finish(result);
    return board;
  }

  running(lane) {
    this.node.dataset.running = lane === null ? "" : String(lane);
    if (lane !== null) this.note.textContent = "One after the other, so that each has the engine to itself.";
  }

  show(speeds) {
    const most = Math.max(...speeds);
    for (const [lane, speed] of speeds.entries()) {
      if (speed === null) continue;
      this.lanes[lane].speed.textContent = `${speed.toFixed(1)} tokens/s`;
      this.lanes[lane].fill.style.width = `${(100 * speed) / most}%`;
    }
  }

  progress(shares) {
    for (const [lane, share] of shares.entries()) this.lanes[lane].fill.style.width = `${100 * share}%`;
  }

  finish({ speeds: [on, off], same, isShort }) {
    const factor = element("strong", "", `${(on / off).toFixed(2)}×`);
    if (!isShort) this.factor.replaceChildren(factor, element("span", "", "the speed, with drafts"));
    const note = same ? "Both answers are the same." : "The answers differ.";
    this.note.textContent = isShort ? `${note} They are too short to compare speeds.` : note;
  }
}
