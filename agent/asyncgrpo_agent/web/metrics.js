// Which of TRL's metrics each chart shows. Names are TRL's own: those of 1.16 first, then what the
// stable trainer (1.18 and later) and GRPO call the same; `like` finds it under a name that is newer still.

export const CHARTS = [
  { key: "reward", title: "Reward", running: 20,
    lines: [{ names: ["reward", "reward/mean", "rewards/mean"], label: "mean of the step" }] },
  { key: "ratio", title: "Importance ratio", axis: [0.99, 1.01], digits: 4, each: "ratio/",
    lines: [{ names: ["ratio", "importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/mean"], like: /(^|\/)(importance_sampling_)?ratio(\/mean|_mean)?$/, label: "ratio" }] },
  { key: "staleness", title: "Staleness", unit: "versions",
    lines: [
      { names: ["sample/staleness_mean", "staleness/mean", "staleness_mean", "staleness"], like: /staleness.*mean/, label: "mean" },
      { names: ["sample/staleness_max", "staleness/max", "staleness_max"], like: /staleness.*max/, label: "max" },
    ] },
  { key: "queue", title: "Rollout queue", unit: "samples", zero: true,
    lines: [{ names: ["sample/rollout_queue_size", "rollout_queue_size", "queue/size", "queue_size"], like: /(^|\/)(rollout_|buffer_)?queue_?(size|length|depth)$/, label: "waiting to be trained" }] },
  { key: "time", title: "Time of a step", unit: "s", zero: true,
    lines: [
      { names: ["perf/step_s", "step_time", "perf/step_time", "perf/step_time_s"], label: "step" },
      { names: ["perf/fwd_bwd_s", "fwd_bwd_time", "perf/fwd_bwd_time", "perf/fwd_bwd_time_s"], like: /fwd_bwd(_time)?(_s)?$/, label: "forward/backward" },
      { names: ["perf/rollout_wait_s", "rollout_wait_time", "perf/rollout_wait_time", "perf/rollout_wait_time_s"], like: /rollout_wait(_time)?(_s)?$/, label: "wait for rollouts" },
    ] },
  { key: "tokens", title: "Tokens a second", unit: "tokens/s", zero: true,
    lines: [
      { names: ["rollout/generated_tok_s", "agrpo/tokens_per_s"], like: /generat\w*_tok\w*_(per_)?s/, label: "generated" },
      { names: ["perf/trained_tok_s_wall_clock", "perf/forwarded_tok_s_wall_clock"], like: /trained_tok\w*_s/, label: "trained" },
    ] },
  { key: "flight", title: "Rollouts in flight", unit: "requests", zero: true,
    lines: [
      { names: ["rollout/inflight", "agrpo/in_flight"], like: /in_?flight$/, label: "running" },
      { names: ["agrpo/held"], label: "held" },
    ] },
  { key: "sync", title: "Time of a sync", unit: "s", zero: true,
    lines: [
      { names: ["perf/weight_sync_s", "agrpo/sync_s"], like: /weight_sync(_time)?(_s)?$/, label: "sync" },
      { names: ["agrpo/paused_s", "perf/weight_sync_pause_s"], label: "generation paused" },
    ] },
  { key: "backpressure", title: "Backpressure", unit: "s", zero: true,
    lines: [
      { names: ["rollout/backpressure_s"], like: /backpressure/, label: "generation waits for training" },
      { names: ["rollout/score_wait_s"], like: /score_wait/, label: "wait for scores" },
    ] },
];

const leaf = (name) => name.slice(name.lastIndexOf("/") + 1);

/** The name under which this run logs a line, or null: by name, by its part behind the slash, by `like`. */
export function resolve(line, available) {
  const known = new Set(available);
  const moved = () => (line.names[0].includes("/") ? available.find((name) => leaf(name) === leaf(line.names[0])) : undefined);
  const alike = () => (line.like ? available.find((name) => line.like.test(name)) : undefined);
  return line.names.find((name) => known.has(name)) ?? moved() ?? alike() ?? null;
}

/** A chart's lines that this run logs, each with its name; `each` adds one for every name that begins so. */
export function linesOf(chart, available) {
  const found = chart.lines.map((line) => ({ label: line.label, name: resolve(line, available) })).filter((line) => line.name);
  const more = chart.each ? available.filter((name) => name.startsWith(chart.each)).sort() : [];
  return [...found, ...more.map((name) => ({ label: name.slice(chart.each.length), name }))];
}

/** All that the standard charts need of this run. */
export function wanted(available, more = []) {
  const found = CHARTS.flatMap((chart) => linesOf(chart, available).map((line) => line.name));
  return [...new Set([...found, ...more])];
}

/** A chart of one metric that none of the others shows. */
export function chartOf(name) {
  return { key: `metric:${name}`, title: name, lines: [{ names: [name], label: "" }], extra: true };
}
