// A labelled list of choices.

import { h } from "./dom.js";

/** `options`: [[value, word]]. Returns the label's element; `.select` is the control. */
export function choice(id, label, options, onChange) {
  const select = h("select", { id, name: id }, options.map(([value, word]) => h("option", { value }, word)));
  select.addEventListener("change", () => onChange(select.value));
  const root = h("label", { class: "choice", for: id }, h("span", { class: "unseen" }, label), select);
  return Object.assign(root, { select });
}
