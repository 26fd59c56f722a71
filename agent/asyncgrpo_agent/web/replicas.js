// The replicas, one row each: sorted by a click on a heading, updated in place.

import { h, panel, put } from "./dom.js";
import { judgePolicy } from "./findings.js";
import { compact, number, percent, plural, seconds, UNKNOWN, version } from "./format.js";
import { icon, stateMark, tone } from "./icons.js";

const HELD = { held: ["ok", "as announced"], lags: ["info", "not yet"], other: ["error", "other digest"], unverified: ["warning", "unverified"] };

const COLUMNS = [
  ["Replica", (one) => one.name, (one) => h("b", {}, one.name)],
  ["State", (one) => one.state, (one) => h("span", { title: one.reason }, stateMark(one.state), h("small", {}, ` ${seconds(one.since_s)}`))],
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

export function replicas() {
  const find = h("input", { type: "search", placeholder: "Find a replica", "aria-label": "Find a replica" });
  const note = h("span", { class: "quiet" });
  const view = panel("replicas", "Replicas", note, h("div", { class: "tools" }, find));
  const body = h("tbody", { role: "rowgroup" });
  let sorted = 0;
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
    const { rows: held } = judgePolicy(state.syncs, state.replicas);
    const wanted = state.replicas.filter((one) => `${one.name} ${one.state} ${one.source ?? ""}`.toLowerCase().includes(find.value.toLowerCase()));
    const value = (one) => COLUMNS[sorted][1](one, held.get(one.name)) ?? -1;
    wanted.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.name.localeCompare(b.name)) * (down ? -1 : 1));
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === sorted ? (down ? "descending" : "ascending") : "none"));
    put(body, wanted.map((one) => h("tr", { role: "row", class: one.state === "GONE" ? "gone" : "" },
      COLUMNS.map(([name, , cell]) => h("td", { role: "cell", "data-label": name }, cell(one, held.get(one.name)))))));
    const ready = state.replicas.filter((one) => one.state === "READY").length;
    note.textContent = `${number(ready)} ready of ${plural(state.replicas.length, "replica")}`;
    if (!wanted.length) put(body, h("tr", { role: "row" }, h("td", { role: "cell", colspan: COLUMNS.length, class: "quiet" }, state.replicas.length ? "No replica is called so." : "No replica has registered.")));
  }

  return { root: view.root, show(next) { state = next; show(); } };
}
