// What has happened, newest first, filtered by kind, severity and text.

import * as api from "./api.js";
import { choice } from "./choice.js";
import { h, panel, put } from "./dom.js";
import { clock, plural, seconds, stamp } from "./format.js";
import { icon, tone } from "./icons.js";
import { windowed } from "./windowed.js";

const KINDS = ["replica", "trainer", "sync", "run", "alert", "proxy", "security"];
const SEVERITIES = ["info", "warning", "error"];
const TYPING_MS = 250;

export function events(name, nowUnix) {
  let known = [];
  let kind = "";
  let least = 0;
  let timer = 0;
  let asked = 0; // a late answer to an earlier question is dropped
  const text = h("input", { type: "search", placeholder: "Find in events", "aria-label": "Find in events", id: "event-text" });
  text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(reload, TYPING_MS); });
  const kinds = choice("event-kind", "Kind of event", [["", "All kinds"], ...KINDS.map((one) => [one, one])], (value) => { kind = value; reload(); });
  const severity = choice("event-severity", "Severity", [["0", "All"], ["1", "Warnings and errors"], ["2", "Errors"]], (value) => { least = Number(value); draw(); });
  const note = h("span", { class: "quiet", role: "status" });
  const view = panel("events", "Events", note, h("div", { class: "tools" }, kinds, severity, text));
  const list = windowed({ label: "Events, newest first", rowHeight: 44, height: 440, row, onChoose: detail, onEnd: older });
  const more = h("div", { class: "detail", hidden: true });
  put(view.body, list.root, more);

  function row({ event }) {
    return [h("span", { class: `state ${tone(event.severity)}` }, icon(event.severity), h("span", { class: "unseen" }, event.severity)),
      h("span", { class: "when" }, clock(event.t_unix_s, nowUnix())), h("span", { class: "what", title: event.text }, event.text), h("small", {}, event.name)];
  }

  function detail({ event }) {
    more.hidden = false;
    const fields = Object.entries({ time: stamp(event.t_unix_s), kind: event.kind, replica: event.replica, duration: event.duration_s == null ? null : seconds(event.duration_s), ...event.fields });
    put(more, h("p", {}, event.text), h("dl", { class: "fields" }, fields.filter(([, value]) => value !== null && value !== "").map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))))));
  }

  const fits = (event) => (!kind || event.kind === kind) && `${event.text} ${event.replica ?? ""} ${event.name}`.toLowerCase().includes(text.value.toLowerCase());

  function draw() {
    const shown = known.filter((event) => SEVERITIES.indexOf(event.severity) >= least);
    list.show(shown.map((event) => ({ key: event.seq, event, fresh: event.fresh })));
    note.textContent = shown.length ? plural(shown.length, "event") : "No event fits.";
  }

  async function reload() {
    const turn = ++asked;
    const found = await api.events(name, { kind, text: text.value }).catch(() => null);
    if (found === null || turn !== asked) return;
    known = found;
    draw();
  }

  async function older() {
    const turn = asked;
    const found = known.length ? await api.events(name, { before_seq: known.at(-1).seq, kind, text: text.value }).catch(() => []) : [];
    if (!found.length || turn !== asked) return;
    known = [...known, ...found];
    draw();
  }

  return {
    root: view.root,
    show({ events: told }) { if (!kind && !text.value) known = told; draw(); },
    /** Shows those of one replica, or with any other text. */
    find(words) {
      text.value = words;
      reload();
      view.root.scrollIntoView();
      text.focus({ preventScroll: true });
    },
    add(event) {
      if (!fits(event) || known.some((one) => one.seq === event.seq)) return;
      known = [{ ...event, fresh: true }, ...known];
      draw();
    },
  };
}
