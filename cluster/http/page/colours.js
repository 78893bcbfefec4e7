// Colours of code, by highlight.js, which is loaded with the first block.

const MAX_CODE = 50_000; // characters; more stay plain: a block is coloured again with each piece that comes

let highlighter = null;
let loading = null;

function load() {
  loading ??= import("./vendor/highlight/highlight.min.js").then((library) => (highlighter = library.default));
  return loading;
}

/** Colour the code of `node`, now or when the library is there. Unknown languages stay plain. */
export function colour(node, language) {
  if (!language || node.textContent.length > MAX_CODE) return;
  if (highlighter) show(node, language);
  else load().then(() => show(node, language), () => {});
}

function show(node, language) {
  if (!highlighter.getLanguage(language)) return;
  const html = highlighter.highlight(node.textContent, { language, ignoreIllegals: true }).value;
  // In a document of its own, where nothing runs or is loaded; classes and text alone are taken over.
  const parsed = new DOMParser().parseFromString(html, "text/html").body;
  node.replaceChildren(...Array.from(parsed.childNodes, copied));
}

function copied(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  const span = document.createElement("span");
  span.className = node.className;
  span.append(...Array.from(node.childNodes, copied));
  return span;
}
