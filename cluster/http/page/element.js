// Nodes that several modules make.

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(label, action, className = "small") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

/** Copies what `text` returns, and says so for a moment. */
export function copyButton(text) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed"; // by the browser: pages over plain HTTP from another machine
    }
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}
