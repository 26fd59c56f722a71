// A sync as bars on one axis of seconds since it began. Pure.
//
// The trainer's phases come first, one after the other. A replica's are told as durations, but for
// those of SINCE, which count from the moment when it noticed the announcement. Clocks of hosts are
// not compared: a replica's row begins at the announcement and ends with its answer.

const SINCE = new Set(["visible", "staged", "queued", "total", "acked"]);
const TRAINER_TONES = { save: 0, check: 1, hash: 1, copy: 3, upload: 3, commit: 4 };
const TONES = { notice: 0, visible: 1, wait: 0, stage: 2, read: 2, verify: 3, check: 3, sync: 3, load: 4, loaded: 4, warm_up: 5, ack: 5, other: 0 };
export const WORDS = {
  notice: "notice", visible: "files seen", wait: "wait", read: "read", check: "verify", verify: "verify", sync: "write to disk",
  stage: "stage", load: "load", loaded: "load", warm_up: "warm up", ack: "answer", other: "other",
  save: "save", hash: "hash", copy: "copy", commit: "commit", upload: "upload",
};

export const word = (phase) => WORDS[phase] ?? phase.replaceAll("_", " ");
export const toneOf = (phase, trainer = false) => (trainer ? TRAINER_TONES[phase] : TONES[phase]) ?? 2;

/** `[{phase, from_s, to_s}]` of durations one after the other. */
function chain(phases_s, from_s) {
  let at = from_s;
  return Object.entries(phases_s ?? {}).filter(([, value]) => value > 0).map(([phase, value]) => {
    const bar = { phase, from_s: at, to_s: at + value };
    at += value;
    return bar;
  });
}

/** A replica's bars, `end_s` after the announcement being its answer. */
export function replicaBars(phases_s, announced_s, end_s) {
  const phases = phases_s ?? {};
  if (!Object.keys(phases).some((name) => SINCE.has(name))) {
    const bars = chain(phases, announced_s);
    const told_s = bars.length ? bars.at(-1).to_s - announced_s : 0;
    const rest_s = end_s - told_s; // before its own clock began: the announcement's way
    if (bars.length && !("notice" in phases) && rest_s > 0.001) {
      return [{ phase: "notice", from_s: announced_s, to_s: announced_s + rest_s }, ...chain(phases, announced_s + rest_s)];
    }
    return bars;
  }
  const noticed_s = announced_s + Math.max(0, end_s - (phases.acked ?? phases.total ?? end_s));
  const bars = [];
  let at = announced_s;
  const to = (phase, when_s) => {
    if (when_s > at + 0.0005) bars.push({ phase, from_s: at, to_s: when_s });
    at = Math.max(at, when_s);
  };
  to("notice", noticed_s);
  if ("visible" in phases) to("visible", noticed_s + phases.visible);
  if ("staged" in phases) to("wait", noticed_s + phases.staged - sum(phases, ["read", "check", "sync"]));
  for (const phase of ["read", "check", "sync"]) if (phase in phases) to(phase, at + phases[phase]);
  if ("loaded" in phases) {
    if ("total" in phases) to("wait", noticed_s + phases.total - phases.loaded);
    to("loaded", at + phases.loaded);
  }
  to("ack", announced_s + end_s);
  return bars;
}

function sum(phases, keys) {
  return keys.reduce((total, key) => total + (phases[key] ?? 0), 0);
}

/** `{announced_s, end_s, trainer: bars, replicas: [{name, ok, reason, end_s, bars, longest}]}`. */
export function timeline(sync, ordered) {
  const trainer = chain(sync.trainer_phases_s, 0);
  const announced_s = trainer.length ? trainer.at(-1).to_s : 0;
  const replicas = ordered.map((one) => {
    const end_s = one.since_announced_s ?? null;
    const bars = end_s === null ? [] : replicaBars(one.phases_s, announced_s, end_s);
    const longest = bars.reduce((best, bar) => (best && best.to_s - best.from_s >= bar.to_s - bar.from_s ? best : bar), null);
    return { name: one.name, ok: one.ok, reason: one.reason ?? "", end_s, bars, longest };
  });
  const ends = [sync.elapsed_s ?? 0, announced_s, ...replicas.map((one) => announced_s + (one.end_s ?? 0))];
  return { announced_s, end_s: Math.max(...ends, 0.001), trainer, replicas };
}

/** Round marks of an axis from 0 to `end`. */
export function marks(end, most = 6) {
  const rough = end / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, index) => index * step);
}
