// Every sync, and the waterfall of one of them by replica and phase.

import * as api from "./api.js";
import { figure, h, panel, put } from "./dom.js";
import { lastOf, silentIn, slowestFirst } from "./findings.js";
import { bytes, clock, number, seconds, UNKNOWN, version } from "./format.js";
import { icon, tone } from "./icons.js";
import { marks, timeline, toneOf, word } from "./timeline.js";
import { windowed } from "./windowed.js";

const ROW_PX = 46;

export function syncs(name, nowUnix) {
  const view = panel("syncs", "Syncs");
  const note = h("span", { class: "quiet" });
  view.head.append(note);
  const list = windowed({ label: "Syncs, newest first", rowHeight: ROW_PX, height: 430, row, onChoose: (item) => choose(item.sync), onEnd: older });
  const lines = h("ol", { class: "waterfall", tabindex: "0" }); // kept, and with it the focus and the place in it
  const above = h("div", { class: "above" });
  const below = h("div", { class: "below" });
  const empty = h("p", { class: "empty" }, "There was no sync yet.");
  const picture = h("div", { class: "picture" }, above, lines, below);
  put(view.body, h("div", { class: "split" }, list.root, picture));
  let known = [];
  let replicas = [];
  let chosen = null; // a version; null follows the newest
  let ended = false;

  function row({ sync }) {
    const last = lastOf(sync);
    const failed = (sync.replicas ?? []).filter((one) => !one.ok).length;
    const state = sync.timed_out || failed ? "warning" : "ok";
    return [h("span", { class: "top" }, h("b", {}, version(sync.version)), h("span", { class: `state ${tone(state)}` }, icon(state), sync.timed_out ? "timed out" : seconds(sync.elapsed_s))),
      h("small", {}, `${clock(sync.started_unix_s, nowUnix())} · ${last ? `last ${last.name} ${seconds(last.seconds)}` : "no replica yet"}${failed ? ` · ${number(failed)} failed` : ""}`)];
  }

  function choose(sync) {
    chosen = sync.version === known[0]?.version ? null : sync.version;
    draw(sync);
  }

  async function older() {
    if (ended || !known.length) return;
    const more = await api.syncs(name, known.at(-1).version).catch(() => []);
    ended = !more.length;
    take(more);
  }

  function take(rows) {
    const all = new Map([...known, ...rows].map((sync) => [sync.version, sync]));
    known = [...all.values()].sort((a, b) => b.version - a.version);
    show();
  }

  function show() {
    list.show(known.map((sync) => ({ key: sync.version, sync })));
    const sync = known.find((one) => one.version === chosen) ?? known[0];
    list.mark(sync?.version ?? null);
    note.textContent = known.length ? `newest ${version(known[0].version)}` : "";
    lines.hidden = !sync;
    if (sync) draw(sync);
    else put(above, empty);
  }

  function draw(sync) {
    const silent = silentIn(sync, replicas, nowUnix());
    const isNewest = sync.version === known[0]?.version;
    const line = timeline(sync, slowestFirst(sync));
    const at = (value) => `${(100 * value) / line.end_s}%`;
    const bar = (one, trainer) => h("i", { class: `bar tone-${toneOf(one.phase, trainer)}`, title: `${word(one.phase)}: ${seconds(one.to_s - one.from_s)}`, style: { left: at(one.from_s), width: at(one.to_s - one.from_s) } });
    const track = (bars, trainer) => h("span", { class: "track" }, bars.map((one) => bar(one, trainer)));
    const told = (bars) => bars.map((one) => `${word(one.phase)} ${seconds(one.to_s - one.from_s)}`).join(", ");
    const last = silent.length ? null : line.replicas.find((one) => one.ok);
    const rows = line.replicas.map((one) => h("li", { class: `line ${one.ok ? "" : "failed"}` },
      h("span", { class: "who" }, one.name, one === last && line.replicas.length > 1 ? h("small", {}, " last") : null), track(one.bars, false),
      h("span", { class: "took", title: one.reason }, one.ok ? seconds(one.end_s) : h("span", { class: "is-bad" }, one.reason || "no answer"), one.ok && one.longest ? h("small", {}, ` ${word(one.longest.phase)} ${seconds(one.longest.to_s - one.longest.from_s)}`) : null),
      h("span", { class: "unseen" }, told(one.bars))));
    const waiting = silent.map((name) => h("li", { class: "line" }, h("span", { class: "who" }, name), h("span", { class: "track" }),
      h("span", { class: "took is-warn" }, isNewest ? `not yet, ${seconds(Math.max(0, Math.round(nowUnix() - sync.started_unix_s)))}` : "overtaken by the next")));
    const tones = new Map();
    for (const one of [...line.trainer.map((bar) => [bar, true]), ...line.replicas.flatMap((replica) => replica.bars.map((bar) => [bar, false]))]) tones.set(word(one[0].phase), toneOf(one[0].phase, one[1]));
    put(above,
      h("dl", { class: "figures" }, figure("Sync", version(sync.version)), figure("Took", seconds(sync.elapsed_s)), figure("Quorum after", seconds(sync.quorum_s)), figure("Size", bytes(sync.bytes)),
        figure("Digest", sync.digest ? h("code", {}, String(sync.digest).slice(0, 12)) : UNKNOWN), figure("Generation paused", seconds(sync.paused_s ?? 0))),
      sync.reason ? h("p", { class: "soft" }, sync.reason) : null);
    lines.setAttribute("aria-label", `Sync ${version(sync.version)} by replica, slowest first`);
    put(lines, h("li", { class: "line trainer" }, h("span", { class: "who" }, "trainer"), track(line.trainer, true), h("span", { class: "took" }, seconds(line.announced_s)), h("span", { class: "unseen" }, told(line.trainer))), waiting, rows);
    put(below,
      h("div", { class: "line axis", "aria-hidden": "true" }, h("span", { class: "who" }), h("span", { class: "track" }, marks(line.end_s).map((value) => h("small", { style: { left: at(value) } }, `${number(value)} s`))), h("span", { class: "took" })),
      h("p", { class: "key" }, [...tones].map(([phase, shade]) => h("span", {}, h("i", { class: `tone-${shade}` }), phase))));
  }

  return { root: view.root, show({ syncs: rows, replicas: present }) { replicas = present; take(rows); } };
}
