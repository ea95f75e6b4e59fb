// As much of a document as markdown.js uses. There is no way to put markup in: what it builds is
// what was asked for node by node.

class FakeNode {
  constructor(tag, text = "") {
    this.tag = tag;
    this.text = text;
    this.dataset = {};
    this.childNodes = [];
    this.parent = null;
  }

  get ownerDocument() {
    return fakeDocument;
  }

  get lastChild() {
    return this.childNodes.at(-1);
  }

  get textContent() {
    return this.text + this.childNodes.map((child) => child.textContent).join("");
  }

  append(...nodes) {
    for (const node of nodes) node.parent = this;
    this.childNodes.push(...nodes);
  }

  remove() {
    this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1);
  }

  replaceWith(node) {
    node.parent = this.parent;
    this.parent.childNodes[this.parent.childNodes.indexOf(this)] = node;
  }

  /** Nested arrays: [tag, ...children]; a text node is a string. */
  get shape() {
    if (this.tag === "#text") return this.text;
    return [this.tag, ...this.childNodes.map((child) => child.shape)];
  }

  *descendants() {
    for (const child of this.childNodes) {
      yield child;
      yield* child.descendants();
    }
  }
}

export const fakeDocument = {
  createElement: (tag) => new FakeNode(tag),
  createTextNode: (text) => new FakeNode("#text", text),
};
