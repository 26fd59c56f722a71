// The replicas, one row each: sorted by a click on a heading, updated in place.

import { choice } from "./choice.js";
import { h, panel, put, say } from "./dom.js";
import { judgePolicy, judgeSyncs } from "./findings.js";
import { compact, number, percent, plural, seconds, UNKNOWN, version } from "./format.js";
import { icon, stateMark, tone } from "./icons.js";

const MOST_SKEW_S = 5;
const SETTLED_S = 60; // a newcomer may lag
const HELD = {
  held: ["ok", "as announced"], next: ["ok", "next on its way"], lags: ["info", "not yet"], refused: ["warning", "refused the newest"],
  other: ["error", "other digest"], unverified: ["warning", "unverified"],
};

const COLUMNS = [
  ["Replica", (one) => one.name, null], // made once, so that the focus stays
  ["State", (one) => one.state, (one) => h("span", { title: one.reason }, stateMark(one.state), h("small", {}, ` ${seconds(one.since_s)}`),
    one.state === "JOINING" && one.reason ? h("small", {}, ` ${one.reason}`) : null)],
  ["Newest", (one) => one.newest_version ?? -1, (one) => h("span", { title: (one.loaded ?? []).join("\n") }, version(one.newest_version),
    one.lag_versions > 0 ? h("small", {}, ` ${number(one.lag_versions)} behind`) : null, h("small", {}, ` ${number((one.loaded ?? []).length)} held`))],
  ["Digest", (one, held) => held ?? "", (one, held) => (HELD[held] ? h("span", { class: `state ${tone(HELD[held][0])}` }, icon(HELD[held][0]), HELD[held][1]) : UNKNOWN)],
  ["In flight", (one) => one.in_flight, (one) => [meter(one.in_flight / one.capacity), ` ${number(one.in_flight)}`, h("small", {}, ` of ${number(one.capacity)}`)]],
  ["Tokens/s", (one) => one.tokens_per_s, (one) => compact(one.tokens_per_s)],
  ["KV use", (one) => one.kv_used, (one) => (one.kv_used == null ? UNKNOWN : [meter(one.kv_used), ` ${percent(one.kv_used)}`])],
  ["Share", (one) => one.share, (one) => percent(one.share)],
  ["Failures", (one) => one.failures, (one) => [h("span", { class: one.failures ? "is-warn" : "" }, number(one.failures)), h("small", {}, ` of ${compact(one.requests)}`)]],
  ["Round trip", (one) => one.rtt_ms, (one) => (one.rtt_ms == null ? UNKNOWN : `${number(one.rtt_ms, one.rtt_ms < 10 ? 1 : 0)} ms`)],
  ["Skew", (one) => Math.abs(one.skew_s ?? 0), (one) => seconds(one.skew_s)],
  ["Last load", (one) => one.last_load_s, (one) => seconds(one.last_load_s)],
  ["Paused", (one) => one.paused_s, (one) => seconds(one.paused_s)],
  ["Agent", (one) => one.agent_version ?? "", (one) => one.agent_version ?? UNKNOWN],
  ["vLLM", (one) => one.vllm_version ?? "", (one) => [one.vllm_version ?? UNKNOWN, one.quantization ? h("small", {}, ` ${one.quantization}`) : null]],
  ["Source", (one) => one.source ?? "", (one) => [one.source ?? UNKNOWN, one.unverified ? h("small", { class: "is-warn" }, " unverified") : null]],
  ["Per hour", (one) => one.price_per_hour, (one) => (one.price_per_hour ? number(one.price_per_hour, 2) : UNKNOWN)],
];

function meter(share) {
  return h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${Math.max(0, Math.min(1, share || 0)) * 100}%` } }));
}

/** `onName(name)`: somebody wants to know more of a replica. */
export function replicas(nowUnix, onName) {
  const find = h("input", { type: "search", placeholder: "Find a replica", "aria-label": "Find a replica", id: "replica-text" });
  const which = choice("replica-state", "State", [["", "All"], ["look", "To look at"], ["READY", "Ready"], ["SUSPECT", "Suspect"], ["JOINING", "Joining"], ["DRAINING", "Draining"]], show);
  const note = h("span", { class: "quiet", role: "status" });
  const view = panel("replicas", "Replicas", note, h("div", { class: "tools" }, which, find));
  const body = h("tbody", { role: "rowgroup" });
  const none = h("tr", { role: "row" }, h("td", { role: "cell", colspan: COLUMNS.length, class: "quiet" }));
  const rows = new Map(); // name -> its row; kept as long as the replica is there
  let sorted = null; // a column; null: those to look at first
  let down = false;
  let state = null;
  const heads = COLUMNS.map(([name], index) => {
    const button = h("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      down = sorted === index ? !down : index > 3;
      sorted = index;
      show();
    });
    return h("th", { scope: "col", role: "columnheader" }, button);
  });
  put(view.body, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of replicas" },
    h("table", { role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), body)));
  find.addEventListener("input", show);

  function show() {
    if (!state) return;
    const held = judgePolicy(state.syncs, state.replicas).rows;
    const slow = judgeSyncs(state.syncs, state.replicas, nowUnix()).name;
    const words = find.value.toLowerCase();
    const mark = (one) => marked(one, held.get(one.name), slow);
    const fits = (one) => (!which.select.value || (which.select.value === "look" ? mark(one) : one.state === which.select.value))
      && `${one.name} ${one.state} ${one.source ?? ""}`.toLowerCase().includes(words);
    const wanted = state.replicas.filter(fits);
    const value = (one) => (sorted === null ? (mark(one) ? 0 : 1) : COLUMNS[sorted][1](one, held.get(one.name)) ?? -1);
    wanted.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.name.localeCompare(b.name)) * (down ? -1 : 1));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === sorted ? (down ? "descending" : "ascending") : "none"));
    place(wanted.map((one) => update(one, held.get(one.name), mark(one))));
    for (const name of rows.keys()) if (!state.replicas.some((one) => one.name === name)) rows.delete(name);
    const ready = state.replicas.filter((one) => one.state === "READY").length;
    const looked = state.replicas.filter(mark).length;
    say(note, `${number(ready)} ready of ${plural(state.replicas.length, "replica")}${looked ? `, ${number(looked)} to look at` : ""}`);
    if (!wanted.length) {
      say(none.firstChild, state.replicas.length ? "No replica fits." : "No replica has registered.");
      place([none]);
    }
  }

  /** Puts rows in this order; one that is where it belongs is not touched, nor what is selected in it. */
  function place(wanted) {
    const here = new Set(wanted);
    for (const row of [...body.children]) if (!here.has(row)) row.remove();
    wanted.forEach((row, index) => {
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
  }

  function update(one, held, mark) {
    let row = rows.get(one.name);
    if (!row) {
      row = h("tr", { role: "row" }, COLUMNS.map(([name]) => h("td", { role: "cell", "data-label": name })));
      const button = h("button", { type: "button", class: "plain", title: "Show its events" }, one.name);
      button.addEventListener("click", () => onName(one.name));
      row.firstChild.append(button, h("small", { class: "is-warn" }));
      rows.set(one.name, row);
    }
    row.className = one.state === "GONE" ? "gone" : "";
    say(row.firstChild.lastChild, mark ? ` ${mark}` : "");
    COLUMNS.forEach(([, , cell], index) => {
      if (!cell) return;
      const fresh = h("td", {}, cell(one, held));
      const old = row.children[index];
      if (!old.firstChild || old.innerHTML !== fresh.innerHTML) old.replaceChildren(...fresh.childNodes);
    });
    return row;
  }

  return { root: view.root, show(next) { state = next; show(); } };
}

/** Why somebody should look at this one, in a word or two; "" if nobody need. */
function marked(one, held, slow) {
  if (held === "other") return "other bytes";
  if (held === "refused") return "refuses";
  if (one.state !== "READY") return one.state.toLowerCase();
  if (one.name === slow) return "slow to sync";
  if (Math.abs(one.skew_s ?? 0) > MOST_SKEW_S) return "clock";
  return held === "lags" && one.since_s > SETTLED_S ? "lags" : "";
}
