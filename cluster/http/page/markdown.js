// Markdown as DOM nodes. marked only splits the text into tokens here; no HTML of an answer is ever interpreted.

import { Marked } from "./vendor/marked/marked.js";
import { colour } from "./colours.js";
import { copyButton, element } from "./element.js";
import { FORMULA_EXTENSIONS, formulaNode } from "./formulas.js";

const LINK = /^(https?:|mailto:)/i;

const marked = new Marked({ extensions: FORMULA_EXTENSIONS });

export const lexer = (text) => marked.lexer(text);

/** Shows Markdown that grows. Blocks that have not changed since the last `show` keep their nodes. */
export class MarkdownView {
  constructor() {
    this.node = element("div", "markdown");
    this.blocks = []; // the source of each block shown
  }

  show(text) {
    const tokens = lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < tokens.length && tokens[same].raw === this.blocks[same]) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    this.node.append(...tokens.slice(same).map(block));
    this.blocks = tokens.map((token) => token.raw);
  }
}

function block(token) {
  switch (token.type) {
    case "heading":
      return filled(`h${Math.min(6, token.depth + 2)}`, token.tokens); // the page itself has h1 to h3
    case "paragraph":
      return filled("p", token.tokens);
    case "text": // of a list item
      return token.tokens ? filled("span", token.tokens) : element("span", "", token.text);
    case "code":
      return codeBlock(token);
    case "formula":
      return formulaNode(token);
    case "blockquote": {
      const quote = element("blockquote");
      quote.append(...blocks(token.tokens));
      return quote;
    }
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return element("hr");
    default: // HTML among them: shown as it was written
      return element("p", "", token.raw);
  }
}

const blocks = (tokens) => tokens.filter((token) => token.type !== "space").map(block);

function list(token) {
  const node = element(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) node.start = token.start;
  for (const item of token.items) {
    const entry = element("li");
    entry.append(...blocks(item.tokens));
    if (item.task) entry.prepend(item.checked ? "☑ " : "☐ ");
    node.append(entry);
  }
  return node;
}

function table(token) {
  const row = (cells, tag) => {
    const node = element("tr");
    for (const cell of cells) {
      const made = filled(tag, cell.tokens);
      if (cell.align) made.className = `align-${cell.align}`;
      node.append(made);
    }
    return node;
  };
  const node = element("table");
  node.append(row(token.header, "th"), ...token.rows.map((cells) => row(cells, "td")));
  const frame = element("div", "table");
  frame.append(node);
  return frame;
}

function codeBlock(token) {
  const node = element("div", "code");
  const head = element("div", "code-head");
  const language = (token.lang ?? "").split(" ")[0];
  head.append(element("span", "", language), copyButton(() => token.text));
  const pre = element("pre");
  const code = element("code", "", token.text);
  colour(code, language);
  pre.append(code);
  pre.tabIndex = 0; // so that the keyboard can scroll it
  node.append(head, pre);
  return node;
}

function filled(tag, tokens) {
  const node = element(tag);
  node.append(...tokens.map(inline));
  return node;
}

function inline(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return filled(token.type, token.tokens);
    case "formula":
      return formulaNode(token);
    case "codespan":
      return element("code", "", token.text);
    case "br":
      return element("br");
    case "link":
      return link(token.href, token.tokens.map(inline));
    case "image": // pictures from elsewhere are not loaded
      return link(token.href, [token.text || token.href]);
    case "escape":
      return document.createTextNode(token.text);
    case "text":
      return token.tokens ? filled("span", token.tokens) : document.createTextNode(decoded(token.text));
    default:
      return document.createTextNode(token.raw);
  }
}

/** Text with its character references (`&lt;`, `&#8364;`) replaced. */
function decoded(text) {
  const parser = new DOMParser();
  return text.replace(/&(?:#\d+|#x[\da-f]+|[a-z][\da-z]*);/gi, (reference) =>
    parser.parseFromString(reference, "text/html").body.textContent,
  );
}

function link(address, content) {
  const node = element(LINK.test(address) ? "a" : "span");
  node.append(...content);
  if (node.tagName === "A") Object.assign(node, { href: address, target: "_blank", rel: "noopener noreferrer" });
  return node;
}
