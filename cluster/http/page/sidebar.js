// The list of conversations: search, delete with undo, export.

import { found } from "./conversations.js";
import { button, element } from "./element.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { toast } from "./toast.js";

const byId = (id) => document.getElementById(id);

export class Sidebar {
  /** conversations: a `Conversations`. current(): the open one. open(conversation): opens one. closed(id): one is
   * gone. */
  constructor(conversations, { current, open, closed }) {
    Object.assign(this, { conversations, current, open, closed });
    byId("search").addEventListener("input", () => this.show());
    byId("export-markdown").addEventListener("click", () => this.exportOpen("md"));
    byId("export-json").addEventListener("click", () => this.exportOpen("json"));
    byId("export-all").addEventListener("click", () => {
      download("conversations.json", "application/json", asJson(this.conversations.all()));
    });
  }

  show() {
    const all = this.conversations.all();
    const words = byId("search").value;
    const nodes = all.flatMap((conversation) => {
      const snippet = found(conversation, words);
      return snippet === null ? [] : [this.entry(conversation, snippet)];
    });
    byId("conversations").replaceChildren(...nodes);
    byId("search").hidden = all.length < 2 && !words;
    byId("nothing-found").hidden = nodes.length > 0 || all.length === 0;
    byId("no-conversations").hidden = all.length > 0;
    byId("export").hidden = all.length === 0;
    const isStored = all.some(({ id }) => id === this.current().id);
    for (const id of ["export-markdown", "export-json"]) byId(id).disabled = !isStored;
  }

  entry(conversation, snippet) {
    const node = element("li");
    const open = button(conversation.title, () => this.open(this.conversations.read(conversation.id)), "open");
    if (snippet) open.append(element("span", "note", snippet));
    if (conversation.id === this.current().id) open.ariaCurrent = "true";
    const remove = button("×", () => this.remove(conversation), "small remove");
    remove.ariaLabel = `Delete “${conversation.title}”`;
    node.append(open, remove);
    return node;
  }

  remove(conversation) {
    const wasOpen = conversation.id === this.current().id;
    this.conversations.remove(conversation.id);
    if (wasOpen) this.closed();
    this.show();
    const line = toast(`Deleted “${conversation.title}”.`, () => {
      this.conversations.save(conversation, conversation.updated);
      if (wasOpen) this.open(conversation);
      else this.show();
    });
    line.lastChild.focus(); // the button that was pressed is gone
  }

  exportOpen(ending) {
    const conversation = this.conversations.read(this.current().id);
    const [type, text] =
      ending === "md" ? ["text/markdown", asMarkdown(conversation)] : ["application/json", asJson([conversation])];
    download(fileName(conversation.title, ending), type, text);
  }
}
