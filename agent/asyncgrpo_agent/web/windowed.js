// A long list of which only the visible rows exist. One focus for the list; arrow keys choose a row.

import { h } from "./dom.js";

const SPARE_ROWS = 6;

/** `row(item)`: content of a row; `onChoose(item)`; `onEnd()` when the last rows come into sight. */
export function windowed({ label, rowHeight, height, row, onChoose, onEnd }) {
  const id = `list-${label.replace(/\W+/g, "-").toLowerCase()}`;
  const canvas = h("div", { class: "canvas", role: "presentation" });
  const root = h("div", { class: "windowed", role: "listbox", tabindex: "0", "aria-label": label, style: { maxHeight: `${height}px` } }, canvas);
  let items = [];
  let chosen = null; // key of an item
  let asked = -1;
  let top = 0; // of root's scrolling: to read it there would lay the page out once more
  root.addEventListener("scroll", () => {
    top = root.scrollTop;
    draw();
  }, { passive: true });
  root.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(root.clientHeight / rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !items.length) return;
    event.preventDefault();
    const from = items.findIndex((item) => item.key === chosen);
    choose(items[Math.max(0, Math.min(items.length - 1, (from < 0 ? -1 : from) + moves[event.key]))]);
  });

  function choose(item) {
    chosen = item.key;
    const place = items.indexOf(item) * rowHeight;
    if (place < top) scroll(place);
    if (place + rowHeight > top + root.clientHeight) scroll(place + rowHeight - root.clientHeight);
    draw();
    onChoose?.(item);
  }

  function scroll(to) {
    root.scrollTop = to;
    top = root.scrollTop;
  }

  function draw() {
    canvas.style.height = `${items.length * rowHeight}px`;
    const from = Math.min(top, Math.max(0, items.length * rowHeight - height)); // of a list that became shorter
    const first = Math.max(0, Math.floor(from / rowHeight) - SPARE_ROWS);
    const last = Math.min(items.length, Math.ceil((from + height) / rowHeight) + SPARE_ROWS);
    canvas.replaceChildren(...items.slice(first, last).map((item, offset) => element(item, first + offset)));
    if (chosen !== null && items.slice(first, last).some((item) => item.key === chosen)) root.setAttribute("aria-activedescendant", `${id}-${chosen}`);
    else root.removeAttribute("aria-activedescendant");
    if (last === items.length && items.length && asked !== items.length && top > 0) {
      asked = items.length;
      onEnd?.();
    }
  }

  function element(item, index) {
    const made = h("div", {
      class: `row ${item.fresh ? "fresh" : ""}`, role: "option", id: `${id}-${item.key}`, "aria-selected": String(item.key === chosen),
      "aria-setsize": items.length, "aria-posinset": index + 1, style: { top: `${index * rowHeight}px`, height: `${rowHeight}px` },
    }, row(item));
    made.addEventListener("click", () => choose(item));
    return made;
  }

  return {
    root,
    /** Items have a `key` each; a list that is scrolled stays where it is when rows come in on top. */
    show(next) {
      const grown = top > 0 && items.length ? next.findIndex((item) => item.key === items[0].key) : 0;
      items = next;
      draw();
      if (grown > 0) {
        scroll(top + grown * rowHeight); // once the canvas is as high as that
        draw();
      }
    },
    mark(key) {
      chosen = key;
      draw();
    },
  };
}
