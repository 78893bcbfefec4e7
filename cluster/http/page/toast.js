// A line that says what has happened, with a button to undo it. It stays while the pointer or the keyboard's focus is on
// it.

import { button, element } from "./element.js";

const SHOWN_MS = 12_000;
let timer = null;

/** undo: what the button does; without it there is no button. Returns the line. */
export function toast(text, undo) {
  const node = document.getElementById("toast");
  node.replaceChildren(element("span", "", text));
  if (undo) {
    const back = button("Undo", () => {
      close();
      undo();
    });
    node.append(back);
  }
  node.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => closeUnused(node), SHOWN_MS);
  return node;
}

function closeUnused(node) {
  if (node.matches(":hover, :has(:focus-visible)")) timer = setTimeout(() => closeUnused(node), 1000);
  else close();
}

function close() {
  document.getElementById("toast").hidden = true;
}
