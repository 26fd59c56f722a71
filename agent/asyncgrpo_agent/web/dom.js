// Elements from data. Text is always set as text, never parsed as markup: names, prompts and reasons
// come from other hosts.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("p", {class: "quiet"}, "text", child)`. Functions become event listeners. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") Object.assign(element.style, value); // the CSSOM, which the policy allows
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets a node's text, and leaves the node alone if it says that already. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

export function put(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/** A panel with its heading; returns {root, tools, body}. */
export function panel(id, title, ...tools) {
  const body = h("div", {});
  const heading = h("h2", { id: `${id}-title` }, title);
  const head = h("header", {}, heading, ...tools);
  const root = h("section", { class: "panel", id, "aria-labelledby": `${id}-title` }, head, body);
  return { root, head, body };
}

/** A term and its value, of a list of figures. */
export function figure(term, value, small = "") {
  return h("div", {}, h("dt", {}, term), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null));
}
