// Where rollouts went and why, and those that wait.

import { figure, h, panel, put } from "./dom.js";
import { compact, number, percent, plural, seconds } from "./format.js";

const MEANING = {
  affinity: "to the replica that has the prompt's blocks", "least loaded": "to the one with the least to do",
  spill: "affinity's replica was at its limit", probe: "tries a suspect replica",
};
const MOST_SENDS = 1.2;

export function routing() {
  const view = panel("routing", "Routing");
  view.body.className = "body";
  return {
    root: view.root,
    show({ routing: told }) {
      if (!told) return put(view.body, h("p", { class: "quiet" }, "Nothing is known of the routing of this run."));
      const shares = Object.entries(told.shares ?? {});
      const total = shares.reduce((sum, [, count]) => sum + count, 0);
      const sends = told.retries_per_success == null ? null : 1 + told.retries_per_success;
      put(view.body,
        h("ul", { class: "shares", "aria-label": "Rollouts by reason of their place" }, shares.map(([name, count]) => {
          const share = total ? count / total : 0;
          const limit = name === "affinity" ? told.affinity_limit : null;
          return h("li", {}, h("span", {}, h("b", {}, name), h("small", {}, ` ${MEANING[name] ?? ""}`)),
            h("span", { class: "wide" }, h("i", { style: { width: `${100 * share}%` } }), limit ? h("em", { style: { left: `${100 * limit}%` }, title: `limit ${percent(limit)}` }) : null),
            h("span", { class: "took" }, percent(share), h("small", {}, ` ${compact(count)}${limit ? `, limit ${percent(limit)}` : ""}`)));
        })),
        h("dl", { class: "figures" }, figure("Waiting now", number(told.waiting)), figure("Oldest waits", seconds(told.oldest_wait_s)), figure("Held in all", seconds(told.held_s)),
          figure("Sent again", number(told.retried)), figure("Duplicates", number(told.duplicates)), figure("Delayed", number(told.delayed)),
          h("div", { class: sends > MOST_SENDS ? "is-warn" : "" }, h("dt", {}, "Sends for a success"), h("dd", {}, number(sends, 2), h("small", {}, ` limit ${MOST_SENDS}`)))),
        told.waiting ? h("p", { class: "soft" }, `${plural(told.waiting, "rollout")} wait for a replica that holds their adapter.`) : null);
    },
  };
}
