import assert from "node:assert/strict";
import { test } from "node:test";

import {
  MarkdownView,
  parseBlocks,
  parseInline,
} from "../../../../runtime/server/static/markdown.js";
import { cut, dice } from "./dice.mjs";
import { fakeDocument } from "./fake_dom.mjs";

function render(text) {
  const container = fakeDocument.createElement("main");
  new MarkdownView(container).show(text);
  return container;
}

function shapes(text) {
  return render(text).shape.slice(1);
}

test("paragraphs, headings, code and lists", () => {
  const text =
    "One **bold** and `code`.\nSame.\n\n## Head\n- a\n  more\n- b\n\n" +
    "```py\nx = '**'\n\ny\n```\nEnd";
  assert.deepEqual(shapes(text), [
    ["p", "One ", ["strong", "bold"], " and ", ["code", "code"], ".\nSame."],
    ["p", "Head"],
    ["div", ["ul", ["li", "a\nmore"], ["li", "b"]]],
    ["pre", ["code", "x = '**'\n\ny"]],
    ["p", "End"],
  ]);
  const [, heading, , code] = render(text).childNodes;
  assert.equal(heading.className, "heading");
  assert.equal(code.dataset.lang, "py");
});

test("a fence that is open holds the rest, and only its own kind closes it", () => {
  assert.deepEqual(shapes("```\na\n~~~\n``\n- b"), [["pre", ["code", "a\n~~~\n``\n- b"]]]);
  assert.deepEqual(shapes("~~~~\na\n~~~\n~~~~~\nb"), [["pre", ["code", "a\n~~~"]], ["p", "b"]]);
  assert.deepEqual(shapes("1. x\n   ```\n   a\n     b\n   ```"), [
    ["div", ["ol", ["li", "x"]]],
    ["pre", ["code", "a\n  b"]],
  ]);
});

test("lists nest, keep their numbers, and change kind", () => {
  const text = "3. a\n   - b\n     - c\n   - d\n\n4. e\n- f";
  const inner = ["ul", ["li", "b", ["ul", ["li", "c"]]], ["li", "d"]];
  const [block] = render(text).childNodes;
  assert.deepEqual(block.shape, [
    "div",
    ["ol", ["li", "a", inner], ["li", "e"]],
    ["ul", ["li", "f"]],
  ]);
  assert.equal(block.childNodes[0].start, 3);
});

test("however far items are indented, lists nest six deep at most", () => {
  const kinds = ["-", "1."];
  const lines = Array.from({ length: 60 }, (_, i) => `${" ".repeat(4 * i)}${kinds[i % 2]} x`);
  const depth = (node) => 1 + Math.max(0, ...node.childNodes.map(depth));
  const [block] = render(lines.join("\n")).childNodes;
  assert.equal(depth(block), 1 + 2 * 6 + 1); // the block, six times list and item, a text node
  assert.equal(block.textContent, "x".repeat(60));
});

test("code spans come before bold, and what does not pair is text", () => {
  const spans = (text) => parseInline(text).map(({ text: t, code, strong }) => [t, code, strong]);
  assert.deepEqual(spans("**a `b**` c**"), [
    ["a ", false, true],
    ["b**", true, true],
    [" c", false, true],
  ]);
  assert.deepEqual(spans("`` a`b `` `"), [
    ["a`b", true, false],
    [" `", false, false],
  ]);
  for (const plain of ["2 ** 3 ** 4", "a ** b", "**open", "``` x", "*x* _y_ __init__"]) {
    assert.equal(spans(plain).map(([t]) => t).join(""), plain);
    assert.ok(spans(plain).every(([, code, strong]) => !code && !strong), plain);
  }
});

test("markup, links and images stay text", () => {
  const hostile = [
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "![x](http://127.0.0.1/x.png)",
    "[x](javascript:alert(1))",
    "&lt;b&gt;",
  ];
  for (const text of hostile) assert.deepEqual(shapes(text), [["p", text]]);
});

const WORDS = ["a", " ", "\n", "\n\n", "<b>", "é", "  "];
const SIGNS = ["`", "```", "**", "- ", "1. ", "# ", "~~~"];
const PIECES = [...WORDS, ...SIGNS];
const TAGS = new Set(["p", "div", "pre", "code", "strong", "ul", "ol", "li", "#text"]);

function randomText(roll) {
  return Array.from({ length: roll(40) }, () => PIECES[roll(PIECES.length)]).join("");
}

const marks = /[\s`*#~\-.1]/g; // what rendering may take away

/** All text on the page, the names of languages above code included. */
function shownText(node) {
  const own = (node.dataset.lang ?? "") + node.text;
  return own + node.childNodes.map(shownText).join("");
}

test("no text is lost, none is added, and only known elements are made", () => {
  const roll = dice(2);
  for (let round = 0; round < 2000; round += 1) {
    const text = randomText(roll);
    const shown = render(text);
    assert.equal(shownText(shown).replace(marks, ""), text.replace(marks, ""), text);
    for (const node of shown.descendants()) assert.ok(TAGS.has(node.tag), node.tag);
  }
});

test("a text shown as it grows looks like the same text shown at once", () => {
  const roll = dice(3);
  for (let round = 0; round < 500; round += 1) {
    const text = randomText(roll);
    const container = fakeDocument.createElement("main");
    const view = new MarkdownView(container);
    let sofar = "";
    for (const piece of cut(text, roll, 9)) view.show((sofar += piece));
    assert.deepEqual(container.shape, render(text).shape, JSON.stringify(text));
  }
});

test("finished blocks keep their nodes while the text grows", () => {
  const container = fakeDocument.createElement("main");
  const view = new MarkdownView(container);
  view.show("one\n\ntw");
  const [first, second] = container.childNodes;
  view.show("one\n\ntwo\n\nthree");
  assert.equal(container.childNodes[0], first);
  assert.notEqual(container.childNodes[1], second);
  view.show("one");
  assert.deepEqual(container.childNodes, [first]);
});

test("blocks tell their source", () => {
  const text = "a\nb\n\n- c\n\n```\nd\n```";
  assert.deepEqual(
    parseBlocks(text).map(({ source }) => source),
    ["a\nb", "- c", "```\nd\n```"],
  );
});
