// A shape for every state, so that none is told by colour alone.

import { h, svg } from "./dom.js";

const SHAPES = {
  disc: ["circle", { cx: 6, cy: 6, r: 4, fill: "currentColor" }],
  ring: ["circle", { cx: 6, cy: 6, r: 4 }],
  half: ["path", { d: "M6 2a4 4 0 1 1 0 8z M6 2a4 4 0 1 0 0 8", fill: "currentColor", "fill-rule": "evenodd" }],
  triangle: ["path", { d: "M6 1.8 11 10.4H1z", "stroke-linejoin": "round" }],
  square: ["rect", { x: 2.2, y: 2.2, width: 7.6, height: 7.6 }],
  cross: ["path", { d: "M2.5 2.5l7 7m0-7l-7 7" }],
  check: ["path", { d: "M1.8 6.4 4.8 9.4 10.2 2.8" }],
  bars: ["path", { d: "M2 10V6m4 4V2m4 8V4" }],
  down: ["path", { d: "M6 2v8M2.5 6.5 6 10l3.5-3.5" }],
};

/** Shape and tone of a replica's, a run's or a finding's state. */
const STATES = {
  READY: ["disc", "ok"], JOINING: ["half", "quiet"], SUSPECT: ["triangle", "warn"],
  DRAINING: ["down", "quiet"], GONE: ["cross", "quiet"],
  waiting: ["half", "quiet"], running: ["disc", "ok"], finished: ["check", "ok"],
  failed: ["cross", "bad"], past: ["ring", "quiet"],
  ok: ["check", "ok"], info: ["ring", "quiet"], warning: ["triangle", "warn"], error: ["cross", "bad"],
  unknown: ["ring", "quiet"], "trainer-bound": ["bars", "quiet"], "generation-bound": ["triangle", "warn"],
  "sync-bound": ["triangle", "warn"], degraded: ["cross", "bad"], balanced: ["check", "ok"],
  starting: ["half", "quiet"],
};

export function icon(state) {
  const [shape] = STATES[state] ?? STATES.unknown;
  const [tag, attributes] = SHAPES[shape];
  return svg("svg", { class: "icon", viewBox: "0 0 12 12", "aria-hidden": "true" }, svg(tag, attributes));
}

export function tone(state) {
  return `is-${(STATES[state] ?? STATES.unknown)[1]}`;
}

/** A state in shape, colour and word. */
export function stateMark(state, word = String(state).toLowerCase()) {
  return h("span", { class: `state ${tone(state)}` }, icon(state), word);
}
