// The answers on top: why the run is as fast as it is, who holds up the syncs, what is served.

import { h, put } from "./dom.js";
import { judgePolicy, judgeSyncs } from "./findings.js";
import { quantity, seconds } from "./format.js";
import { icon, tone } from "./icons.js";

export function verdict(nowUnix) {
  const why = card("Why is it this fast?", "why");
  const sync = card("Which replica holds up the sync?", "holdup");
  const policy = card("Is the policy served the one trained?", "policy");
  const alerts = h("ul", { class: "alerts", "aria-label": "Alerts" });
  const root = h("div", { class: "answers" }, why.root, sync.root, policy.root, alerts);

  return {
    root,
    show({ verdict: told, alerts: raised, syncs, replicas }) {
      why.say(told?.kind ?? "unknown", told?.sentence ?? "Nothing is known of this run's speed yet.");
      put(why.more, evidence(told?.evidence ?? []), advice(told?.advice ?? []));
      const held = judgeSyncs(syncs);
      sync.say(held.state, held.sentence);
      const served = judgePolicy(syncs, replicas);
      policy.say(served.state, served.sentence);
      alerts.hidden = !raised?.length;
      put(alerts, (raised ?? []).map((alert) => h("li", { class: `alert ${alert.severity}` },
        h("span", { class: `state ${tone(alert.severity)}` }, icon(alert.severity), alert.severity),
        h("span", {}, h("b", {}, alert.sentence), alert.fix ? ` ${alert.fix}` : ""),
        h("span", { class: "quiet" }, alert.since_unix_s ? `for ${seconds(Math.max(1, nowUnix() - alert.since_unix_s))}` : ""))));
    },
  };
}

function card(question, key) {
  const mark = h("span", { class: "mark" });
  const sentence = h("p", { class: "sentence" });
  const more = h("div", { class: "more" });
  const root = h("section", { class: `panel answer ${key}`, id: `answer-${key}`, "aria-labelledby": `answer-${key}-title` },
    h("h2", { id: `answer-${key}-title` }, question), h("div", { class: "said" }, mark, sentence), more);
  return {
    root, more,
    say(state, text) {
      mark.className = `mark ${tone(state)}`;
      put(mark, icon(state));
      if (sentence.textContent !== text) sentence.textContent = text;
    },
  };
}

function evidence(rows) {
  if (!rows.length) return null;
  return h("dl", { class: "figures" }, rows.map((row) => h("div", {}, h("dt", {}, row.name), h("dd", {}, quantity(row.value, row.unit),
    row.limit !== null && row.limit !== undefined ? h("small", {}, ` of ${quantity(row.limit, row.unit)}`) : null))));
}

function advice(list) {
  return list.length ? h("ul", { class: "advice", "aria-label": "What to change" }, list.map((one) => h("li", {}, one))) : null;
}
