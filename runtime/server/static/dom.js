// Small helpers over the document. Text goes in as text nodes, never as markup.

/** The element with this id. */
export function at(id) {
  return document.getElementById(id);
}

/** A new element. `properties` are set on it; `data` on its dataset, `aria` as attributes. */
export function element(tag, { data = {}, aria = {}, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  Object.assign(node.dataset, data);
  for (const [name, value] of Object.entries(aria)) node.setAttribute(`aria-${name}`, value);
  node.append(...children);
  return node;
}

export function button(label, onClick, className = "") {
  const node = element("button", { type: "button", className }, label);
  node.addEventListener("click", onClick);
  return node;
}

/** Puts a text on the clipboard, also where the page is not served over a secure connection and
 * the clipboard's own interface is missing. Resolves to whether it could. */
export async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const back = document.activeElement;
  const area = element("textarea", { value: text, className: "unseen", readOnly: true });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  back?.focus();
  return copied;
}
