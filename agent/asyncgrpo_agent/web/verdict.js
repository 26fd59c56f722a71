// The answers on top: why the run is as fast as it is, who holds up the syncs, what is served.

import { figure, h, put } from "./dom.js";
import { judgePolicy, judgeSyncs } from "./findings.js";
import { clock, number, quantity, seconds, stamp } from "./format.js";
import { icon, tone } from "./icons.js";

const STEADY_MS = 1000; // a sentence that changes faster cannot be read

export function verdict(nowUnix) {
  const why = card("Why is it this fast?", "why");
  const sync = card("Which replica holds up the sync?", "holdup");
  const policy = card("Is the policy served the one trained?", "policy");
  const alerts = h("ul", { class: "alerts", "aria-label": "Alerts" });
  const root = h("div", { class: "answers" }, why.root, sync.root, policy.root, alerts);

  const answers = steadily(({ syncs, replicas }) => {
    const held = judgeSyncs(syncs, replicas, nowUnix());
    sync.say(held.state, held.sentence);
    put(sync.more, held.notes.map((note) => h("p", { class: "soft" }, note)));
    const served = judgePolicy(syncs, replicas);
    policy.say(served.state, served.sentence);
    put(policy.more, served.digest ? h("dl", { class: "figures" }, figure("trained", served.newest), figure("its digest", h("code", {}, served.digest)),
      figure("held by", number(served.held), `of ${number(served.of)}`)) : null);
  });

  return {
    root,
    show(state) {
      const { verdict: told, alerts: raised } = state;
      why.say(told?.kind ?? "unknown", told?.sentence ?? "Nothing is known of this run's speed yet.");
      put(why.more, evidence(told?.evidence ?? []), advice(told?.advice ?? []));
      answers.show(state);
      alerts.hidden = !raised?.length;
      put(alerts, (raised ?? []).map((one) => alert(one, nowUnix())));
    },
    close: answers.close,
  };
}

/** Shows the newest state, but no oftener than every STEADY_MS. */
function steadily(draw) {
  let newest = null;
  let timer = 0;
  const turn = () => {
    timer = newest === null ? 0 : setTimeout(turn, STEADY_MS);
    if (newest !== null) draw(newest);
    newest = null;
  };
  return {
    show(state) {
      newest = state;
      if (!timer) turn();
    },
    close() { clearTimeout(timer); },
  };
}

function alert(one, now) {
  return h("li", { class: `alert ${one.severity}` },
    h("span", { class: `state ${tone(one.severity)}` }, icon(one.severity), one.severity),
    h("span", {}, h("b", {}, one.sentence), one.fix ? h("span", { class: "fix" }, one.fix) : null),
    one.since_unix_s ? h("span", { class: "quiet", title: stamp(one.since_unix_s) }, `since ${clock(one.since_unix_s, now)}, for ${seconds(Math.max(1, Math.round(now - one.since_unix_s)))}`) : null);
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
  return h("dl", { class: "figures" }, rows.map((row) => {
    const limited = row.limit !== null && row.limit !== undefined;
    if (row.unit === "share" || !limited) return figure(row.name, quantity(row.value, row.unit), limited ? `limit ${quantity(row.limit, row.unit)}` : "");
    return figure(row.name, number(row.value), `of ${quantity(row.limit, row.unit)}`);
  }));
}

function advice(list) {
  return list.length ? h("ul", { class: "advice", "aria-label": "What to change" }, list.map((one) => h("li", {}, one))) : null;
}
