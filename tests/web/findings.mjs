// What the page concludes from numbers. usage: node findings.mjs FOLDER, a copy of the page's modules.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const { judgePolicy, judgeSyncs } = await import(pathToFileURL(`${process.argv[2]}/findings.js`));
const digest = (version) => `${version}`.padStart(12, "d");
const adapter = (version, of = digest(version)) => `demo.a0001-abcd.v${String(version).padStart(6, "0")}.${of}`;
const ack = (name, seconds = 0.5) => ({ name, ok: true, since_announced_s: seconds, phases_s: { read: seconds * 0.8, load: seconds * 0.2 } });
const refusal = (name) => ({ name, ok: false, reason: "other sha256", phases_s: {} });
const sync = (version, replicas, more = {}) => ({ version, adapter: adapter(version), digest: digest(version), started_unix_s: 100 + version, quorum_s: 0.5, replicas, ...more });
const replica = (name, loaded, more = {}) => ({ name, state: "READY", since_s: 1000, loaded: loaded.map((one) => (typeof one === "number" ? adapter(one) : one)), ...more });

function policy(syncs, replicas, state, words) {
  const found = judgePolicy(syncs, replicas);
  assert.equal(found.state, state, found.sentence);
  assert.match(found.sentence, words);
}

policy([], [replica("r1", [])], "unknown", /^No adapter has been announced/);
policy([sync(2, []), sync(1, [])], [replica("r1", [1, 2]), replica("r2", [2])], "ok", /^Yes\. All 2 replicas hold v2, as announced\.$/);
// A version on its way is no fault, however old the snapshot of the replicas is.
policy([sync(2, []), sync(1, [])], [replica("r1", [1]), replica("r2", [1])], "ok", /^Yes\. All 2 replicas hold v1 or newer, as announced; v2 is on its way to 2\.$/);
policy([sync(2, [ack("r1")]), sync(1, [])], [replica("r1", [1]), replica("r2", [1])], "ok", /v2 is on its way to one\.$/);
policy([sync(1, [])], [replica("r1", [])], "info", /^Not yet: v1 is on its way/);
policy([sync(3, []), sync(2, []), sync(1, [])], [replica("r1", [3]), replica("r2", [1])], "info", /^Mostly: 1 of 2 replicas hold v3, as announced; r2 does not\.$/);
policy([sync(2, [refusal("r2")]), sync(1, [])], [replica("r1", [2]), replica("r2", [1])], "warning", /r2 does not/);
policy([sync(2, []), sync(1, [])], [replica("r1", [2]), replica("r2", [adapter(2, "0bad0bad0bad")])], "error", /^No\. r2 serves digest 0bad0bad0bad as v2; announced is d+2\.$/);
policy([sync(2, [])], [replica("r1", [2]), replica("r2", [2], { unverified: true })], "warning", /1 replica cannot be verified/);
policy([sync(2, [])], [replica("r1", [2]), replica("r2", [], { state: "JOINING" })], "ok", /^Yes\. The only replica holds v2/);

const names = ["r1", "r2", "r3", "r4", "r5"];
const fleet = names.map((name) => replica(name, []));
const even = Array.from({ length: 8 }, (_, index) => sync(20 - index, names.map((name) => ack(name))));
assert.match(judgeSyncs(even, fleet, 200).sentence, /^Nobody: the last replica usually has an adapter 500 ms/);
const slow = even.map((one) => ({ ...one, replicas: names.map((name) => ack(name, name === "r4" ? 4 : 0.5)) }));
const found = judgeSyncs(slow, fleet, 200);
assert.equal(found.name, "r4");
assert.match(found.sentence, /^r4 came last in 8 of the last 8 syncs: 4\.00 s after the announcement, 8\.0 times the others' 500 ms\.$/);
assert.deepEqual(found.notes, ["Most of it: read, 3.20 s.", "The quorum, after 500 ms, did not wait for it."]);
// One that is overtaken each time never answers, and is the one all the same.
const silent = even.map((one) => ({ ...one, replicas: names.filter((name) => name !== "r4").map((name) => ack(name)) }));
assert.match(judgeSyncs(silent, fleet, 200).sentence, /^r4 was not done with 7 of the last 8 syncs/);
const refusing = slow.map((one) => ({ ...one, replicas: [...one.replicas.slice(0, 4), refusal("r5")] }));
assert.equal(judgeSyncs(refusing, fleet, 200).name, "r4");
assert.equal(judgeSyncs(refusing, fleet, 200).notes.at(-1), "r5 has not taken v20: other sha256.");
assert.equal(judgeSyncs([], fleet, 200).state, "unknown");
