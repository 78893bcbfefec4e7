// One turn of a conversation: the question, which can be edited, and its answer or its race.

import { Answer } from "./answer.js";
import { button, element } from "./element.js";
import { thumbnail } from "./pictures.js";
import { Board, Race } from "./race.js";

export class TurnView {
  /** turn: the conversation's. edit(text): asks that instead. */
  constructor(turn, edit) {
    this.turn = turn;
    this.edit = edit;
    this.node = element("div", "turn");
    this.question = element("div", "question");
    this.body = element("div", "reply");
    this.node.append(this.question, this.body);
    this.showQuestion();
  }

  showQuestion() {
    const change = button("Edit", () => this.editQuestion(), "small edit");
    this.question.classList.remove("editing");
    const shown = (this.turn.pictures ?? []).map(thumbnail);
    this.question.replaceChildren(...shown, element("p", "asked", this.turn.question), change);
  }

  editQuestion() {
    const form = element("form");
    const field = element("textarea");
    field.value = this.turn.question;
    field.rows = Math.min(10, 1 + this.turn.question.split("\n").length);
    field.ariaLabel = "Edit the message";
    const send = element("button", "small primary", "Send");
    const cancel = () => {
      this.showQuestion();
      this.question.querySelector(".edit").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text) this.edit(text);
    };
    form.addEventListener("submit", submit);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      cancel();
    });
    const actions = element("div", "actions");
    actions.append(button("Cancel", cancel), send);
    form.append(field, actions);
    this.question.classList.add("editing");
    this.question.replaceChildren(form);
    field.focus();
  }

  /** The stored answer of the turn, if there is one. */
  showStored(maxModelLen) {
    const { answer, race } = this.turn;
    this.answer = Answer.of(answer ?? { content: "", finish: "failed", error: "There is no answer yet." }, maxModelLen);
    this.body.replaceChildren(this.answer.node);
    if (race) this.body.prepend(Board.of(race).node);
  }

  /** A new answer, or a race; has `run(body, signal, maxModelLen)`. */
  showNew(isRace, speculative) {
    const made = isRace ? new Race() : new Answer(speculative);
    this.answer = isRace ? made.answer : made;
    this.body.replaceChildren(made.node);
    return made;
  }

  /** The buttons of the last turn, {label: action}; an earlier turn has none. */
  offer(actions) {
    for (const old of this.answer.actions.querySelectorAll(".offered")) old.remove();
    const made = Object.entries(actions).map(([label, action]) => button(label, action, "small offered"));
    this.answer.actions.append(...made);
  }
}
