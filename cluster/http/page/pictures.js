// Pictures that go with the next message: pasted, or dropped on the page.

import { button, element } from "./element.js";

const MAX_SIDE = 1024; // pixels; the browser's storage holds about 5 MB of conversations

/** A message's content: `question`, after the data URLs `pictures`, if there are any. */
export function contentOf({ question, pictures = [] }) {
  if (!pictures.length) return question;
  const images = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...images, { type: "text", text: question }];
}

export function thumbnail(url) {
  const made = element("img", "picture");
  made.src = URL.createObjectURL(blobOf(url)); // the page's policy allows no data URLs, which an answer could contain
  made.addEventListener("load", () => URL.revokeObjectURL(made.src), { once: true });
  made.alt = "Picture";
  return made;
}

function blobOf(url) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: "image/jpeg" });
}

export class Pictures {
  /** node: shows them. failed(text): is told of a file that is no picture. */
  constructor(node, failed) {
    this.node = node;
    this.failed = failed;
    this.urls = [];
    document.addEventListener("paste", (event) => this.takeFiles(event, event.clipboardData));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => this.takeFiles(event, event.dataTransfer));
  }

  /** The pictures so far, which go with a message now. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.show();
    return taken;
  }

  async takeFiles(event, transfer) {
    const files = [...(transfer?.files ?? [])];
    if (!files.length) return; // a text
    event.preventDefault();
    for (const file of files) {
      try {
        this.urls.push(await reduced(file));
      } catch {
        this.failed(`${file.name || "The file"} is not a picture that this browser can read.`);
      }
    }
    this.show();
  }

  show() {
    const remove = (at) => () => {
      this.urls.splice(at, 1);
      this.show();
    };
    const shown = this.urls.map((url, at) => {
      const made = element("span");
      made.append(thumbnail(url), button("Remove", remove(at)));
      return made;
    });
    this.node.hidden = !shown.length;
    this.node.replaceChildren(...shown);
  }
}

/** A picture's file as a data URL of at most MAX_SIDE pixels by MAX_SIDE. */
async function reduced(file) {
  const bitmap = await createImageBitmap(file);
  const factor = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * factor));
  canvas.height = Math.max(1, Math.round(bitmap.height * factor));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // below transparent parts
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
