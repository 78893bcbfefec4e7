import assert from "node:assert/strict";
import test from "node:test";
import { acceptanceLength, endingOf, eventsOf, metric, parseMetrics, perPosition, Rounds } from "./page/figures.js";

test("a round ends with the target's own token; the first one came with the prompt", () => {
  const rounds = new Rounds(); // rounds that accept 2, 0 and 1; one that a stop cut after a draft
  for (const drafted of [0, 1, 1, 0, 0, 1, 0, 1]) rounds.push(Boolean(drafted));
  assert.deepEqual([rounds.numTokens, rounds.numDrafted], [8, 4]);
  assert.deepEqual(Array.from(rounds.histogram), [1, 1, 1]);
  rounds.begin(); // the answer goes on: its next token comes with a prompt again
  for (const drafted of [0, 1, 0]) rounds.push(Boolean(drafted));
  assert.deepEqual(Array.from(rounds.histogram), [1, 2, 1]);
});

test("acceptance", () => {
  assert.equal(acceptanceLength([1, 1, 1]), 2);
  assert.equal(acceptanceLength([]), null);
  assert.deepEqual(perPosition([1, 0, 3]), [0.75, 0.75]);
  assert.deepEqual(perPosition([2, , 2]), [0.5, 0.5]);
});

test("Prometheus' text", () => {
  const lines = ["# HELP a b", 'a_total{model_name="x, \\"y\\"",position="0"} 3.0', 'a_total{position="1"} 4', "b 1e3"];
  const samples = parseMetrics(lines.join("\n"));
  assert.deepEqual(samples.map((sample) => sample.value), [3, 4, 1000]);
  assert.equal(metric(samples, "a_total"), 7);
  assert.equal(metric(samples, "a_total", { position: "1" }), 4);
  assert.equal(metric(samples, "c"), null);
});

test("events, wherever the stream is cut", async () => {
  const whole = 'data: {"a":1}\n\ndata: {"b":"x"}\n\ndata: [DONE]\n\n';
  for (let size = 1; size <= whole.length; size++) {
    const pieces = [];
    for (let at = 0; at < whole.length; at += size) pieces.push(whole.slice(at, at + size));
    const found = [];
    for await (const event of eventsOf(pieces)) found.push(event);
    assert.deepEqual(found, ['{"a":1}', '{"b":"x"}', "[DONE]"]);
  }
});

test("an answer that did not end by itself says so, and whether it can go on", () => {
  const ending = (answer) => endingOf({ content: "x", usage: { completion_tokens: 256, total_tokens: 300 }, ...answer }, 1000);
  assert.equal(ending({ finish: "stop" }), null);
  assert.equal(ending({ finish: null }), null);
  assert.deepEqual(ending({ finish: "length" }), { text: "Stopped at the limit of 256 tokens.", canGoOn: true });
  const full = ending({ finish: "length", usage: { completion_tokens: 9, total_tokens: 1000 } });
  assert.match(full.text, /^The context of 1,000 tokens is full/);
  assert.equal(full.canGoOn, false);
  const thinking = ending({ finish: "length", content: "" });
  assert.match(thinking.text, /while reasoning/);
  assert.equal(thinking.canGoOn, false);
  assert.deepEqual(ending({ finish: "failed", error: "gone", content: "" }), { text: "gone", canGoOn: false });
  assert.deepEqual(ending({ finish: "stopped" }), { text: "Stopped.", canGoOn: true });
});
