// What the numbers say, in sentences: who holds up the syncs, and whether what is served is what was
// trained. Pure: data in, a finding out.

import { number, plural, seconds, version } from "./format.js";

const DIGEST_CHARS = 12;
const NOTABLE_S = 0.25; // less than that holds up nobody
const NOTABLE_FACTOR = 1.5; // against the median of the others

const short = (digest) => String(digest ?? "").slice(0, DIGEST_CHARS);

/** "a, b and 3 more". */
export function names(list, most = 3) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${list.length - most} more` : shown;
}

/**
 * Compares the digest announced with those held. `{state: "ok" | "info" | "warning" | "error" |
 * "unknown", sentence, adapter, digest, rows: Map(replica -> "held" | "lags" | "other" | "unverified")}`.
 */
export function judgePolicy(syncs, replicas) {
  const newest = syncs[0];
  const rows = new Map();
  if (!newest?.digest) {
    return { state: "unknown", sentence: "No adapter has been announced yet.", adapter: "", digest: "", rows };
  }
  const announced = new Map(syncs.filter((sync) => sync.digest).map((sync) => [sync.adapter, short(sync.digest)]));
  const present = replicas.filter((one) => one.state !== "GONE");
  const other = [];
  for (const one of present) {
    rows.set(one.name, holding(one, newest, announced, other));
  }
  const count = (what) => [...rows.values()].filter((row) => row === what).length;
  const held = count("held") + count("unverified");
  const what = `${version(newest.version)} (${short(newest.digest)})`;
  const found = { adapter: newest.adapter, digest: short(newest.digest), rows };
  if (other.length) {
    const one = other[0];
    const more = other.length > 1 ? ` and ${other.length - 1} more` : "";
    return {
      ...found, state: "error",
      sentence: `No. ${one.name}${more} serves digest ${one.held} as ${version(one.adapter)}; announced is ${one.announced}.`,
    };
  }
  if (!present.length) return { ...found, state: "unknown", sentence: `${what} is announced; no replica is here to serve it.` };
  const lagging = present.filter((one) => rows.get(one.name) === "lags").map((one) => one.name);
  const unverified = count("unverified");
  const note = unverified ? ` ${plural(unverified, "replica")} cannot be verified.` : "";
  if (lagging.length) {
    return {
      ...found, state: held ? "info" : "warning",
      sentence: `${held ? "Mostly" : "Not yet"}: ${held} of ${plural(present.length, "replica")} hold ${what}; ${names(lagging)} ${lagging.length === 1 ? "does" : "do"} not yet.${note}`,
    };
  }
  return { ...found, state: unverified ? "warning" : "ok", sentence: `Yes. ${present.length === 1 ? "The only replica holds" : `All ${present.length} replicas hold`} ${what}, as announced.${note}` };
}

function holding(replica, newest, announced, other) {
  for (const [adapter, digest] of Object.entries(replica.digests ?? {})) {
    const wanted = announced.get(adapter);
    if (wanted && digest && short(digest) !== wanted) {
      other.push({ name: replica.name, adapter, held: short(digest), announced: wanted });
      return "other";
    }
  }
  const holds = newest.adapter in (replica.digests ?? {}) || (replica.loaded ?? []).includes(newest.adapter);
  if (!holds) return "lags";
  return replica.unverified ? "unverified" : "held";
}

/** The replicas of a sync that answered, slowest first; failures and silence in front. */
export function slowestFirst(sync) {
  const time = (one) => (one.ok && typeof one.since_announced_s === "number" ? one.since_announced_s : Infinity);
  return [...(sync.replicas ?? [])].sort((a, b) => time(b) - time(a) || a.name.localeCompare(b.name));
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Who came last in one sync, and by how much: `{name, seconds, others_s, phase, failed, reason}` or null. */
export function lastOf(sync) {
  const [last, ...others] = slowestFirst(sync);
  if (!last) return null;
  const others_s = median(others.map((one) => one.since_announced_s).filter((value) => typeof value === "number"));
  const failed = !last.ok;
  const seconds_s = last.since_announced_s ?? null;
  const notable = failed || (seconds_s !== null && others_s !== null && seconds_s > NOTABLE_S && seconds_s > NOTABLE_FACTOR * others_s);
  return { name: last.name, seconds: seconds_s, others_s, failed, reason: last.reason ?? "", notable };
}

/** `{state, sentence, name}`: which replica holds up the syncs, newest first. */
export function judgeSyncs(syncs) {
  if (!syncs.length) return { state: "unknown", sentence: "There was no sync yet.", name: "" };
  const lasts = syncs.map(lastOf).filter((one) => one !== null);
  if (!lasts.length) return { state: "unknown", sentence: "No replica took part in the last syncs.", name: "" };
  const failing = lasts[0].failed ? lasts[0] : null;
  if (failing) {
    const why = failing.reason ? `: ${failing.reason}` : "";
    return { state: "warning", sentence: `${failing.name} has not loaded ${version(syncs[0].version)}${why}.`, name: failing.name };
  }
  const counts = new Map();
  for (const one of lasts) if (one.notable) counts.set(one.name, (counts.get(one.name) ?? 0) + 1);
  const [name, times] = [...counts].sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  if (times * 4 < lasts.length || times < 2) {
    const usual = median(lasts.map((one) => one.seconds).filter((value) => value !== null));
    return { state: "ok", sentence: `Nobody: the last replica usually has an adapter ${seconds(usual)} after it was announced.`, name: "" };
  }
  const own = lasts.filter((one) => one.name === name && one.notable);
  const took = median(own.map((one) => one.seconds));
  const others = median(own.map((one) => one.others_s).filter((value) => value !== null));
  const factor = others ? `, ${number(took / others, 1)} times the others' ${seconds(others)}` : "";
  return {
    state: "warning", name,
    sentence: `${name} came last in ${times} of the last ${lasts.length} syncs: ${seconds(took)} after the announcement${factor}.`,
  };
}
