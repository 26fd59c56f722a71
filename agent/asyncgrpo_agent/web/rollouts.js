// Sampled rollouts, for viewers that may read them.

import * as api from "./api.js";
import { h, panel, put } from "./dom.js";
import { clock, number, plural, seconds, version } from "./format.js";

const KEPT = 50;

export function rollouts(name, allowed, nowUnix) {
  const find = h("input", { type: "search", placeholder: "Find in prompts and answers", "aria-label": "Find in prompts and answers" });
  const view = panel("rollouts", "Sampled rollouts", h("div", { class: "tools" }, allowed ? find : null));
  const list = h("div", { class: "samples", tabindex: "0", role: "region", "aria-label": "Sampled rollouts, newest first" });
  put(view.body, list);
  let known = [];
  find.addEventListener("input", draw);

  function say(what, command, fix = "") {
    find.hidden = true;
    put(list, h("div", { class: "empty" }, h("p", {}, what), command ? h("p", {}, h("code", {}, command)) : null, fix ? h("p", { class: "soft" }, fix) : null));
  }

  function draw() {
    find.hidden = false;
    const text = find.value.toLowerCase();
    const shown = known.filter((one) => `${one.prompt} ${one.completion} ${one.replica}`.toLowerCase().includes(text));
    put(list, shown.map(sample));
    if (!shown.length) put(list, h("p", { class: "empty" }, known.length ? "None has this text." : ["None was sampled yet. The trainer samples so many a minute with ", h("code", {}, "trainer.sample_rollouts"), "."]));
  }

  function sample(one) {
    const rewards = Object.entries(one.rewards ?? {});
    return h("article", { class: "sample" },
      h("p", { class: "quiet" }, [clock(one.t_unix_s, nowUnix()), one.version >= 0 && version(one.version), one.replica, plural(one.tokens, "token"), one.seconds > 0 && seconds(one.seconds)].filter(Boolean).join(" · ")),
      h("pre", { class: "prompt" }, one.prompt), h("pre", {}, one.completion),
      rewards.length ? h("dl", { class: "rewards" }, rewards.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, number(value))))) : h("p", { class: "quiet" }, "Rewards are not known yet."));
  }

  return {
    root: view.root,
    async load() {
      if (!allowed) return say("This session may not read rollouts: they are people's prompts and data.", "asyncgrpo-agent token create --role viewer --rollouts");
      try {
        known = await api.rollouts(name, KEPT);
        draw();
      } catch (error) {
        say(error.message, "", error.fix);
      }
    },
    add(one) {
      known = [one, ...known].slice(0, KEPT);
      draw();
    },
  };
}
