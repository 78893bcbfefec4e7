import assert from "node:assert/strict";
import test from "node:test";
import { lexer } from "./page/markdown.js";

/** The formulas of a Markdown text, in order: [text, whether displayed]. */
function formulas(text) {
  const found = [];
  const walk = (tokens) => {
    for (const token of tokens ?? []) {
      if (token.type === "formula") found.push([token.text.trim(), token.display]);
      walk(token.tokens);
      for (const item of token.items ?? []) walk(item.tokens);
      for (const row of [token.header, ...(token.rows ?? [])]) for (const cell of row ?? []) walk(cell.tokens);
    }
  };
  walk(lexer(text));
  return found;
}

const CASES = [
  ["a $x_1$ and $y_2$ b", [["x_1", false], ["y_2", false]]],
  ["so \\(a_1 * b * c\\) holds", [["a_1 * b * c", false]]],
  ["\\[\nx \\\\\n+ y\n\\]", [["x \\\\\n+ y", true]]],
  ["text:\n\\[\n- x\n\\]\nmore", [["- x", true]]],
  ["$$\na = b\n$$\n\nmore", [["a = b", true]]],
  ["inline $$a+b$$ in a line", [["a+b", true]]],
  ["- item \\(x\\)\n- $$y$$\n", [["x", false], ["y", true]]],
  ["1. first\n\n   \\[ z \\]\n\n2. second", [["z", true]]],
  ["| a | b |\n|-|-|\n| $x$ | \\(y\\) |\n", [["x", false], ["y", false]]],
  ["**bold $a*b*c$ text**", [["a*b*c", false]]],
  ["_then \\(a_i b_i\\) so_", [["a_i b_i", false]]],
  ["$\\text{cost} = \\$5$", [["\\text{cost} = \\$5", false]]],
  ["\\[\n\\begin{cases} a & b \\\\[2pt] c & d \\end{cases}\n\\]", [["\\begin{cases} a & b \\\\[2pt] c & d \\end{cases}", true]]],
];

for (const [text, expected] of CASES) test(JSON.stringify(text), () => assert.deepEqual(formulas(text), expected));

const NONE = [
  "It costs $5 and $6.", "from $5-$10", "$5, or US$ 6", "a $ b $ c", "`$x$` and ``\\(y\\)``", "```\n$$\nx\n$$\n```",
  "    $x$", "\\$x\\$", "\\\\(x\\\\)", "$$ open\n\nnext $$", "\\( open", "$$$$", "$", "$x", "an [l](https://e.org/$a$b)",
];

for (const text of NONE) test(`no formula: ${JSON.stringify(text)}`, () => assert.deepEqual(formulas(text), []));

test("Markdown around formulas stays", () => {
  const [first, second] = lexer("so *it* is\n\\[ x \\]\n# Head");
  assert.equal(first.type, "paragraph");
  assert.equal(second.type, "formula");
  assert.deepEqual(lexer("a\n\n- $x$\n").map(({ type }) => type), ["paragraph", "space", "list"]);
});

test("time grows with the text, not with its square", () => {
  const seconds = (text) => {
    const begin = performance.now();
    lexer(text);
    return (performance.now() - begin) / 1000;
  };
  for (const piece of ["$", "$$", "\\(", "\\[", "$a ", "\\( \n", "\n$$x"]) {
    seconds(piece.repeat(500)); // warm
    assert.ok(seconds(piece.repeat(2000)) < 1, piece);
  }
});
