// A small part of Markdown: fenced code, headings, lists, inline code and bold. Everything else,
// links, images and HTML included, stays the text that it is. Parsing takes linear time, so that no
// reply can freeze the page; rendering makes nodes and text nodes only.

const FENCE = /^([ \t]*)(`{3,}|~{3,}(?!~))([^`]*)$/;
const ITEM = /^([ \t]*)(?:[-*+]|(\d{1,9})[.)])[ \t]+(\S.*)$/;
const HEADING = /^#{1,6}[ \t]+(\S.*)$/;
const MAX_DEPTH = 6;

/** @returns {{kind: "code"|"heading"|"list"|"paragraph", source: string}[]} blocks in order.
 * `source` is the block's text; equal sources render alike. code: lang, text. heading and
 * paragraph: text. list: lists, each {ordered, start, items: {text, children: lists}[]}. */
export function parseBlocks(text) {
  const lines = text.split(/\r\n|\n|\r/);
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const { next, ...block } = parseBlock(lines, at);
    blocks.push({ ...block, source: lines.slice(at, next).join("\n") });
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (FENCE.test(lines[at])) return parseCode(lines, at);
  if (ITEM.test(lines[at])) return parseLists(lines, at);
  if (heading) return { kind: "heading", text: heading[1], next: at + 1 };
  return parseParagraph(lines, at);
}

/** A fence that is never closed, as while a reply streams, holds the rest. */
function parseCode(lines, at) {
  const [, indent, fence, info] = FENCE.exec(lines[at]);
  const lang = info.trim();
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => dedent(line, indent.length));
  return { kind: "code", lang, text: inside.join("\n"), next: Math.min(end + 1, lines.length) };
}

function closes(line, fence) {
  const bare = line.trim();
  return bare.length >= fence.length && bare === fence[0].repeat(bare.length);
}

function dedent(line, width) {
  const blank = line.length - line.trimStart().length;
  return line.slice(Math.min(width, blank));
}

function parseParagraph(lines, at) {
  const starts = (line) => FENCE.test(line) || ITEM.test(line) || HEADING.test(line);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !starts(lines[end])) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), next: end };
}

function parseLists(lines, at) {
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = FENCE.test(lines[end]) ? null : ITEM.exec(lines[end]);
    if (match) items.push(newItem(match));
    else if (/^[ \t]+\S/.test(lines[end]) && !FENCE.test(lines[end])) {
      items.at(-1).text += `\n${lines[end].trim()}`;
    } else if (!(lines[end].trim() === "" && ITEM.test(lines[end + 1] ?? ""))) break;
    end += 1;
  }
  return { kind: "list", lists: nest(items), next: end };
}

function newItem([, blank, number, text]) {
  return { indent: blank.length, ordered: number !== undefined, start: Number(number), text };
}

/** Lists inside lists, from how far the items are indented. */
function nest(items) {
  const roots = [];
  const open = []; // the list of each depth, outermost first
  for (const item of items) {
    listFor(item, open, roots).items.push({ text: item.text, children: [] });
  }
  return roots;
}

function listFor({ indent, ordered, start }, open, roots) {
  while (open.length && indent < open.at(-1).indent) open.pop();
  const last = open.at(-1);
  const deeper = last !== undefined && indent > last.indent + 1 && open.length < MAX_DEPTH;
  if (last && !deeper && last.ordered === ordered) return last;
  if (last && !deeper) open.pop();
  const list = { indent, ordered, start: ordered ? start : 1, items: [] };
  (open.at(-1)?.items.at(-1).children ?? roots).push(list);
  open.push(list);
  return list;
}

/** Spans of text, each {text, code, strong}. */
export function parseInline(text) {
  const pieces = splitCode(text).flatMap(splitMarks);
  const strong = pairMarks(pieces);
  return pieces
    .map(({ kind, text: part }, i) => ({ text: part, code: kind === "code", strong: strong[i] }))
    .filter(({ text: part, strong: state }) => part !== "" && state !== null);
}

/** Code spans end at the next run of as many backquotes (CommonMark 6.1). */
function splitCode(text) {
  const runs = [...text.matchAll(/`+/g)];
  const closer = closers(runs);
  const pieces = [];
  let from = 0;
  for (let i = 0; i < runs.length; i += 1) {
    if (closer[i] === undefined) continue;
    const [open, close] = [runs[i], runs[closer[i]]];
    pieces.push({ kind: "text", text: text.slice(from, open.index) });
    const code = text.slice(open.index + open[0].length, close.index);
    pieces.push({ kind: "code", text: trimOne(code) });
    from = close.index + close[0].length;
    i = closer[i];
  }
  return [...pieces, { kind: "text", text: text.slice(from) }];
}

function closers(runs) {
  const seen = new Map(); // length of a run -> the nearest such run to the right
  const result = new Array(runs.length);
  for (let i = runs.length - 1; i >= 0; i -= 1) {
    result[i] = seen.get(runs[i][0].length);
    seen.set(runs[i][0].length, i);
  }
  return result;
}

function trimOne(code) {
  const line = code.replace(/\n/g, " ");
  const padded = line.startsWith(" ") && line.endsWith(" ") && line.trim() !== "";
  return padded ? line.slice(1, -1) : line;
}

function splitMarks(piece) {
  if (piece.kind === "code") return [piece];
  const parts = piece.text.split(/(\*\*)/).filter((part) => part !== "");
  return parts.map((part) => ({ kind: part === "**" ? "mark" : "text", text: part }));
}

/** For each piece whether it is bold; null for a mark that opens or closes. */
function pairMarks(pieces) {
  const strong = pieces.map(() => false);
  let open = null;
  pieces.forEach(({ kind }, i) => {
    if (kind !== "mark") return;
    if (open === null) {
      if (/^\S/.test(pieces[i + 1]?.text ?? "")) open = i;
    } else if (i > open + 1 && /\S$/.test(pieces[i - 1].text)) {
      strong.fill(true, open + 1, i);
      strong[open] = strong[i] = null;
      open = null;
    }
  });
  return strong;
}

/** Shows a text that grows. Blocks that have not changed keep their nodes, and with them what the
 * reader has selected. */
export class MarkdownView {
  #container;
  #sources = [];

  constructor(container) {
    this.#container = container;
  }

  show(text) {
    const blocks = parseBlocks(text);
    blocks.forEach((block, i) => this.#place(block, i));
    while (this.#sources.length > blocks.length) {
      this.#container.lastChild.remove();
      this.#sources.pop();
    }
  }

  #place(block, i) {
    if (this.#sources[i] === block.source) return;
    const fresh = blockNode(this.#container.ownerDocument, block);
    if (i < this.#sources.length) this.#container.childNodes[i].replaceWith(fresh);
    else this.#container.append(fresh);
    this.#sources[i] = block.source;
  }
}

function blockNode(doc, block) {
  if (block.kind === "code") return codeNode(doc, block);
  if (block.kind === "list") {
    return element(doc, "div", block.lists.map((list) => listNode(doc, list)));
  }
  const node = element(doc, "p", inlineNodes(doc, block.text));
  if (block.kind === "heading") node.className = "heading";
  return node;
}

function codeNode(doc, { lang, text }) {
  const pre = element(doc, "pre", [element(doc, "code", [doc.createTextNode(text)])]);
  pre.tabIndex = 0; // long lines scroll, with the keyboard too
  if (lang) pre.dataset.lang = lang;
  return pre;
}

function listNode(doc, { ordered, start, items }) {
  const list = element(doc, ordered ? "ol" : "ul", items.map((item) => itemNode(doc, item)));
  if (ordered) list.start = start;
  return list;
}

function itemNode(doc, { text, children }) {
  const nested = children.map((list) => listNode(doc, list));
  return element(doc, "li", [...inlineNodes(doc, text), ...nested]);
}

function inlineNodes(doc, text) {
  return parseInline(text).map(({ text: part, code, strong }) => {
    const plain = doc.createTextNode(part);
    const node = code ? element(doc, "code", [plain]) : plain;
    return strong ? element(doc, "strong", [node]) : node;
  });
}

function element(doc, tag, children) {
  const node = doc.createElement(tag);
  node.append(...children);
  return node;
}
