// What the numbers say, in sentences: who holds up the syncs, and whether what is served is what was
// trained. Pure: data in, a finding out.

import { number, plural, seconds, version } from "./format.js";
import { replicaBars, word } from "./timeline.js";

const DIGEST_CHARS = 12;
const NOTABLE_S = 0.25; // less than that holds up nobody
const NOTABLE_FACTOR = 1.5; // against the median of the others

const short = (digest) => String(digest ?? "").slice(0, DIGEST_CHARS);

/** "a, b and 3 more". */
export function names(list, most = 3) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${list.length - most} more` : shown;
}

/** "run.attempt.v000812" and digest of a physical name. */
function partsOf(adapter) {
  const cut = String(adapter).lastIndexOf(".");
  return { version: adapter.slice(0, cut), digest: short(adapter.slice(cut + 1)) };
}

/**
 * Compares what was announced with what is held. One version may be on its way: a replica that holds
 * the one before is as good. `{state: "ok" | "info" | "warning" | "error" | "unknown", sentence,
 * newest, digest, held, next, of, rows: Map(replica -> "held" | "next" | "lags" | "refused" | "other"
 * | "unverified")}`.
 */
export function judgePolicy(syncs, replicas) {
  const [newest, before] = syncs.filter((sync) => sync.digest);
  const rows = new Map();
  if (!newest) return { state: "unknown", sentence: "No adapter has been announced yet.", newest: "", digest: "", rows };
  const announced = new Map(syncs.filter((sync) => sync.digest).map((sync) => [partsOf(sync.adapter).version, short(sync.digest)]));
  const serving = replicas.filter((one) => SERVES.has(one.state));
  const wrong = [];
  for (const one of serving) rows.set(one.name, holding(one, newest, before, announced, wrong));
  const named = (what) => serving.filter((one) => rows.get(one.name) === what).map((one) => one.name);
  const unverified = named("unverified");
  const held = named("held").length + unverified.length;
  const next = named("next").length;
  const found = { newest: version(newest.version), digest: short(newest.digest), held, next, of: serving.length, rows };
  if (wrong.length) {
    const [one] = wrong;
    return { ...found, state: "error", sentence: `No. ${names(wrong.map((each) => each.name))} serves digest ${one.held} as ${version(one.adapter)}; announced is ${one.announced}.` };
  }
  const what = found.newest;
  if (!serving.length) return { ...found, state: "unknown", sentence: `${what} is announced; no replica is here to serve it.` };
  const all = serving.length === 1 ? "The only replica holds" : `All ${serving.length} replicas hold`;
  const note = unverified.length ? ` ${plural(unverified.length, "replica")} cannot be verified.` : "";
  const late = [...named("refused"), ...named("lags")];
  if (!late.length && !next) return { ...found, state: unverified.length ? "warning" : "ok", sentence: `Yes. ${all} ${what}, as announced.${note}` };
  const coming = next ? `${what} is on its way to ${next === 1 ? "one" : next}` : "";
  if (!late.length) return { ...found, state: unverified.length ? "warning" : "ok", sentence: `Yes. ${all} ${version(before.version)} or newer, as announced; ${coming}.${note}` };
  const refused = named("refused").length > 0;
  if (!held && !next && !refused) return { ...found, state: "info", sentence: `Not yet: ${what} is on its way to ${plural(serving.length, "replica")}.${note}` };
  const base = next && before ? `${version(before.version)} or newer` : what;
  return {
    ...found, state: refused ? "warning" : "info",
    sentence: `Mostly: ${held + next} of ${plural(serving.length, "replica")} hold ${base}, as announced; ${names(late)} ${late.length === 1 ? "does" : "do"} not${coming ? `; ${coming}` : ""}.${note}`,
  };
}

const SERVES = new Set(["READY", "SUSPECT"]);

function holding(replica, newest, before, announced, wrong) {
  const loaded = replica.loaded ?? [];
  for (const adapter of loaded) {
    const { version: of, digest } = partsOf(adapter);
    const wanted = announced.get(of);
    if (wanted && digest !== wanted) {
      wrong.push({ name: replica.name, adapter, held: digest, announced: wanted });
      return "other";
    }
  }
  const answer = (sync) => sync?.replicas?.find((one) => one.name === replica.name);
  const holds = (sync) => sync && (loaded.includes(sync.adapter) || answer(sync)?.ok === true); // a snapshot may be older
  if (holds(newest)) return replica.unverified ? "unverified" : "held";
  if (answer(newest)?.ok === false) return "refused";
  return holds(before) ? "next" : "lags";
}

/** The replicas of a sync that answered, slowest first; failures and silence in front. */
export function slowestFirst(sync) {
  const time = (one) => (one.ok && typeof one.since_announced_s === "number" ? one.since_announced_s : Infinity);
  return [...(sync.replicas ?? [])].sort((a, b) => time(b) - time(a) || a.name.localeCompare(b.name));
}

/** Names of the replicas that have been there for the whole sync and have not answered. */
export function silentIn(sync, replicas, now_unix_s) {
  const answered = new Set((sync.replicas ?? []).map((one) => one.name));
  const age_s = now_unix_s - (sync.started_unix_s ?? now_unix_s);
  return replicas.filter((one) => SERVES.has(one.state) && !answered.has(one.name) && (one.since_s ?? 0) >= age_s).map((one) => one.name);
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Who loaded a version last, and how far behind the others: `{name, seconds, others_s, notable, longest}` or null. */
export function lastOf(sync) {
  const [last, ...others] = slowestFirst(sync).filter((one) => one.ok && typeof one.since_announced_s === "number");
  if (!last) return null;
  const others_s = median(others.map((one) => one.since_announced_s));
  const seconds_s = last.since_announced_s;
  const bars = replicaBars(last.phases_s, 0, seconds_s);
  const longest = bars.reduce((best, bar) => (best && best.to_s - best.from_s >= bar.to_s - bar.from_s ? best : bar), null);
  const notable = others_s !== null && seconds_s > NOTABLE_S && seconds_s > NOTABLE_FACTOR * others_s;
  return { name: last.name, seconds: seconds_s, others_s, notable, longest };
}

/**
 * `{state, sentence, notes: [sentences], name}`: which replica holds up the syncs. `syncs` are newest
 * first.
 */
export function judgeSyncs(syncs, replicas = [], now_unix_s = 0) {
  if (!syncs.length) return { state: "unknown", sentence: "There was no sync yet.", notes: [], name: "" };
  const refused = refusalOf(syncs);
  const lasts = syncs.map(lastOf);
  const counts = new Map();
  const add = (name) => counts.set(name, (counts.get(name) ?? 0) + 1);
  syncs.forEach((sync, index) => {
    const silent = index ? silentIn(sync, replicas, now_unix_s) : []; // the newest may still be loading
    if (silent.length && silent.length * 4 <= replicas.length) silent.forEach(add);
    else if (lasts[index]?.notable) add(lasts[index].name);
  });
  const [name, times] = [...counts].filter(([one]) => !refused.names.includes(one)).sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  const notes = refused.sentence ? [refused.sentence] : [];
  if (times * 4 < syncs.length || times < 2) {
    const usual = median(lasts.filter(Boolean).map((one) => one.seconds));
    if (refused.sentence) return { state: "warning", sentence: refused.sentence, notes: [], name: "" };
    if (usual === null) return { state: "unknown", sentence: "No replica took part in the last syncs.", notes, name: "" };
    return { state: "ok", sentence: `Nobody: the last replica usually has an adapter ${seconds(usual)} after it was announced.`, notes, name: "" };
  }
  const own = lasts.filter((one) => one?.name === name && one.notable);
  const share = `${times} of the last ${syncs.length} syncs`;
  if (!own.length) return { state: "warning", name, notes, sentence: `${name} was not done with ${share} when the next came.` };
  const took = median(own.map((one) => one.seconds));
  const others = median(own.map((one) => one.others_s));
  const longest = own.map((one) => one.longest).find(Boolean);
  const alike = own.map((one) => one.longest).filter((one) => one && one.phase === longest.phase);
  const most_s = median(alike.map((one) => one.to_s - one.from_s));
  const quorum = median(syncs.map((sync) => sync.quorum_s).filter((value) => typeof value === "number"));
  if (quorum !== null && quorum * NOTABLE_FACTOR < took) notes.unshift(`The quorum, after ${seconds(quorum)}, did not wait for it.`);
  if (longest) notes.unshift(`Most of it: ${word(longest.phase)}, ${seconds(most_s)}.`);
  return { state: "warning", name, notes, sentence: `${name} came last in ${share}: ${seconds(took)} after the announcement, ${number(took / others, 1)} times the others' ${seconds(others)}.` };
}

/** Who has refused the newest version that anybody answered for, and why. */
function refusalOf(syncs) {
  const sync = syncs.find((one) => one.replicas?.length);
  const failed = (sync?.replicas ?? []).filter((one) => !one.ok);
  if (!failed.length) return { names: [], sentence: "" };
  const list = failed.map((one) => one.name);
  const why = failed[0].reason ? `: ${failed[0].reason}` : "";
  return { names: list, sentence: `${names(list)} ${list.length === 1 ? "has" : "have"} not taken ${version(sync.version)}${why}.` };
}
