// The figures of a run, and what it is made of.

import { figure, h, put } from "./dom.js";
import { compact, number, seconds, UNKNOWN } from "./format.js";
import { stateMark } from "./icons.js";

export function facts(nowUnix) {
  const figures = h("dl", { class: "figures" });
  const made = h("p", { class: "quiet made" });
  const root = h("section", { class: "panel facts", id: "facts", "aria-label": "Figures of the run" }, figures, made);
  return {
    root,
    show({ run, replicas, facts: told }) {
      const total = (key) => replicas.reduce((sum, one) => sum + (one[key] ?? 0), 0);
      const paused = Math.max(0, ...replicas.map((one) => one.paused_s ?? 0));
      put(figures,
        h("div", {}, h("dt", {}, "State"), h("dd", {}, stateMark(run.state))),
        figure("Step", number(run.step), run.max_steps ? `of ${number(run.max_steps)}` : ""),
        figure("Reward", number(run.reward)),
        figure("Replicas ready", number(run.ready), `of ${number(run.registered)}`),
        figure("Tokens a second", compact(total("tokens_per_s"))),
        figure("In flight", number(total("in_flight")), `of ${number(total("capacity"))}`),
        figure("Generation paused", seconds(paused)),
        figure("Cost so far", run.cost ? number(run.cost, 2) : UNKNOWN),
        figure("Replica hours", number(run.replica_hours, 1)),
        figure("Attempt", run.attempt || UNKNOWN, run.since_unix_s ? `for ${seconds(nowUnix() - run.since_unix_s)}` : ""));
      const parts = [told?.model, told?.trl_version && `TRL ${told.trl_version}`, told?.vllm_version && `vLLM ${told.vllm_version}`, told?.agent_version && `agent ${told.agent_version}`,
        told?.weight_sync_steps && `sync every ${told.weight_sync_steps} steps`, told?.max_staleness != null && `max_staleness ${told.max_staleness}`];
      put(made, parts.filter(Boolean).join(" · "));
    },
  };
}
