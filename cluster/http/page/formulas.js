// Formulas: found in Markdown before marked sees their backslashes and underscores; shown by KaTeX, which is loaded with
// the first one.

import { element } from "./element.js";

const MAX_FORMULA = 10_000; // characters, so that an opening mark without its end costs no search of the whole text

// [opening, closing, whether a line of its own]
const MARKS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

const PRICE = /^[\d.,]+\s+[A-Za-z]{2}/; // "$5, or US$ 6": a number, then words

/** The formula at the start of `source`: {raw, text, display}, or undefined. A single dollar opens one only before and
 * closes one only after what is not a space, and not before a digit, as in pandoc: "$5 and $6" are prices. */
export function formulaAt(source) {
  const [open, close, display] = MARKS.find(([mark]) => source.startsWith(mark)) ?? [];
  const end = open ? endOf(source, open.length, close) : -1;
  if (end < 0) return undefined;
  const text = source.slice(open.length, end);
  const isPrice = open === "$" && (/^\s|\s$/.test(text) || PRICE.test(text) || /^\d/.test(source.slice(end + 1)));
  if (!text.trim() || isPrice) return undefined;
  return { type: "formula", raw: source.slice(0, end + close.length), text, display };
}

/** Where the closing mark begins; -1 if there is none before an empty line, which no formula has. */
function endOf(source, begin, close) {
  if (source.indexOf(close, begin) < 0) return -1; // soon, for texts of many opening marks
  for (let at = begin; at < Math.min(source.length, MAX_FORMULA); at++) {
    if (source.startsWith(close, at)) return at;
    if (source[at] === "\\") at += 1; // \$ is a dollar inside a formula
    else if (source[at] === "\n" && /^[ \t]*\n/.test(source.slice(at + 1, at + 80))) return -1;
  }
  return -1;
}

/** A formula on lines of its own, at the start of `source`. */
function blockAt(source) {
  const indent = /^ {0,3}/.exec(source)[0];
  const formula = formulaAt(source.slice(indent.length));
  if (!formula?.display) return undefined;
  const rest = /^[ \t]*(?:\n+|$)/.exec(source.slice(indent.length + formula.raw.length));
  return rest ? { ...formula, raw: indent + formula.raw + rest[0] } : undefined;
}

/** Where such a formula ends the paragraph before it. */
function blockStart(source) {
  for (const match of source.matchAll(/\n(?= {0,3}(?:\$\$|\\\[))/g)) {
    if (blockAt(source.slice(match.index + 1))) return match.index;
  }
  return undefined;
}

function inlineStart(source) {
  const at = source.search(/\$|\\[([]/);
  return at < 0 ? undefined : at;
}

/** marked's extensions. Code comes first where it stands first: marked reads from the left. */
export const FORMULA_EXTENSIONS = [
  { name: "formulaBlock", level: "block", start: blockStart, tokenizer: blockAt },
  { name: "formulaInline", level: "inline", start: inlineStart, tokenizer: formulaAt },
];

let katex = null;
let loading = null;

function load() {
  loading ??= (async () => {
    const style = element("link");
    Object.assign(style, { rel: "stylesheet", href: "page/vendor/katex/katex.min.css" });
    document.head.append(style);
    await import("./vendor/katex/katex.min.js"); // sets a global variable
    katex = globalThis.katex;
  })();
  return loading;
}

/** The formula as a node; its source until KaTeX is there, and if it is none. */
export function formulaNode({ text, raw, display }) {
  const node = element(display ? "div" : "span", display ? "formula" : "", raw.trim());
  if (katex) render(node, text, display);
  else load().then(() => render(node, text, display), () => {});
  return node;
}

function render(node, text, display) {
  const written = node.textContent;
  try {
    // `trust` is off: no formula makes a link, loads a picture or sets attributes.
    katex.render(text, node, { displayMode: display, throwOnError: true, strict: false, trust: false, maxExpand: 500 });
  } catch {
    node.textContent = written;
    node.classList.add("no-formula");
  }
}
