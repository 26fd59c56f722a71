// All runs: a table, and those chosen side by side.

import * as api from "./api.js";
import { compare } from "./compare.js";
import { h, panel, put } from "./dom.js";
import { number, seconds, UNKNOWN } from "./format.js";
import { stateMark } from "./icons.js";

const EVERY_MS = 5000;
const MOST = 4;

export function runsPage(nowUnix) {
  const view = panel("runs", "Runs", h("span", { class: "quiet" }, `Choose up to ${MOST} to see them side by side.`));
  const beside = compare();
  const chosen = new Set();
  const body = h("tbody", {});
  const heads = ["", "Run", "State", "Verdict", "Step", "Reward", "Replicas", "Cost", "Replica hours", "Since"];
  put(view.body, h("div", { class: "scroll runs", tabindex: "0", role: "region", "aria-label": "Table of runs" },
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((one) => h("th", { scope: "col" }, one || h("span", { class: "unseen" }, "Compare"))))), body)));

  async function load() {
    const rows = await api.runs().catch(() => null);
    if (!rows) return;
    if (!chosen.size) rows.filter((one) => one.state === "running").slice(0, 2).forEach((one) => chosen.add(one.name));
    if (!body.contains(document.activeElement)) put(body, rows.map(row));
    beside.show([...chosen]);
  }

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.name}` });
    box.checked = chosen.has(run.name);
    box.addEventListener("change", () => {
      if (box.checked && chosen.size < MOST) chosen.add(run.name);
      else chosen.delete(run.name);
      box.checked = chosen.has(run.name);
      beside.show([...chosen]);
    });
    const cells = [box, h("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name), stateMark(run.state), run.verdict?.sentence ?? UNKNOWN,
      [number(run.step), run.max_steps ? h("small", {}, ` of ${number(run.max_steps)}`) : null], number(run.reward), `${number(run.ready)} of ${number(run.registered)}`,
      run.cost ? number(run.cost, 2) : UNKNOWN, number(run.replica_hours, 1), run.since_unix_s ? seconds(nowUnix() - run.since_unix_s) : UNKNOWN];
    return h("tr", {}, cells.map((cell, index) => h("td", { class: index === 3 ? "sentence" : "" }, cell)));
  }

  load();
  const timer = setInterval(load, EVERY_MS);
  return { root: [view.root, beside.root], close() { clearInterval(timer); beside.close(); } };
}
