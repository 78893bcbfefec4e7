import assert from "node:assert/strict";
import test from "node:test";
import { resultOf } from "./page/race.js";

const answer = (speed, more = {}) => ({ tokensPerSecond: () => speed, timedTokens: 50, finish: "stop", content: "a", ...more });

test("a race has a result when both answers are over", () => {
  assert.deepEqual(resultOf([answer(80), answer(40)]), { speeds: [80, 40], same: true, isShort: false });
  assert.equal(resultOf([answer(80), answer(40, { content: "b", finish: "length" })]).same, false);
  assert.ok(resultOf([answer(80), answer(40, { timedTokens: 15 })]).isShort);
  for (const finish of [null, "failed", "stopped"]) assert.equal(resultOf([answer(80), answer(40, { finish })]), undefined);
  assert.equal(resultOf([answer(80), answer(null)]), undefined); // one token: no time between the first and the last
});
