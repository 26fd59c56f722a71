// The page of one run: loads it, follows it, and hands every change to the panels.

import * as api from "./api.js";
import { charts } from "./charts.js";
import { h, put, say } from "./dom.js";
import { events } from "./events.js";
import { facts } from "./facts.js";
import { clock } from "./format.js";
import { follow } from "./live.js";
import { wanted } from "./metrics.js";
import { replicas } from "./replicas.js";
import { rollouts } from "./rollouts.js";
import { routing } from "./routing.js";
import { POINTS, Series } from "./series.js";
import { syncs } from "./syncs.js";
import { verdict } from "./verdict.js";

const SYNCS = 40; // that findings are made of
const EVERY_MS = 400; // between two drawings
const PATIENCE_MS = 1500;

/** `early` is a snapshot that has been asked for already. */
export async function runPage(name, who, nowUnix, onState, early = null) {
  let state = await (early ?? api.snapshot(name));
  let history = new Series();
  let timer = 0;
  let drawn_ms = -EVERY_MS;
  let loading = false;
  const dirty = new Set();
  const panels = { charts: charts(loadSeries) };
  loadSeries(); // which takes longest, and the other panels can be made meanwhile
  Object.assign(panels, {
    verdict: verdict(nowUnix), facts: facts(nowUnix), replicas: replicas(nowUnix, (one) => panels.events.find(one)), syncs: syncs(name, nowUnix),
    routing: routing(), events: events(name, nowUnix), rollouts: rollouts(name, who.scopes.includes("rollouts"), nowUnix),
  });
  const notice = outage(nowUnix);
  const root = [notice.root, panels.verdict.root, panels.facts.root, panels.charts.root, panels.replicas.root, panels.syncs.root,
    h("div", { class: "side" }, panels.routing.root, panels.rollouts.root), panels.events.root];

  /** Draws these panels soon. A sync of fifty replicas is fifty events within a second. */
  function later(...which) {
    which.forEach((one) => dirty.add(one));
    if (!timer) timer = setTimeout(() => requestAnimationFrame(draw), Math.max(0, drawn_ms + EVERY_MS - performance.now()));
  }

  /** Draws what is awaited with the next frame. */
  function soon(...which) {
    clearTimeout(timer);
    timer = 0;
    drawn_ms = -EVERY_MS;
    later(...which);
  }

  function draw() {
    timer = 0;
    drawn_ms = performance.now();
    for (const one of dirty) {
      if (one === "charts") panels.charts.show(history, state.series_names);
      else panels[one].show(state);
    }
    dirty.clear();
  }

  async function loadSeries() {
    if (loading) return;
    loading = true;
    try {
      const names = wanted(state.series_names, panels.charts.extras());
      if (names.length) history = new Series(await api.series(name, names, POINTS));
      soon("charts");
    } catch (error) {
      if (!(error instanceof api.ApiError)) throw error; // the proxy is away, and so is the stream
    } finally {
      loading = false;
    }
  }

  async function reload() {
    try {
      state = await api.snapshot(name);
    } catch {
      return; // it has gone again, and says to load anew when it is back
    }
    later("verdict", "facts", "replicas", "syncs", "routing", "events");
    await loadSeries();
  }

  function on(kind, data) {
    if (kind === "snapshot") {
      const known = state.series_names.length;
      state = { ...state, ...data, syncs: state.syncs, events: state.events };
      later("verdict", "facts", "replicas", "routing");
      if (state.series_names.length !== known) loadSeries();
    } else if (kind === "step") {
      if (!history.append(data)) loadSeries();
      later("charts");
    } else if (kind === "sync") {
      state.syncs = [data, ...state.syncs.filter((one) => one.version !== data.version)].slice(0, SYNCS);
      later("verdict", "replicas", "syncs");
    } else if (kind === "note") panels.events.add(data);
    else if (kind === "rollout") panels.rollouts.add(data);
    else reload();
  }

  later("verdict", "facts", "replicas", "syncs", "routing", "events", "charts");
  panels.rollouts.load();
  const stop = state.run.state === "past" ? (onState("past"), () => {}) : follow(name, state.seq, on, (link) => {
    onState(link);
    notice.show(link);
  });
  return { root, close() { stop(); clearTimeout(timer); panels.charts.close(); panels.verdict.close(); } };
}

/** Says that what is shown is no longer new, once the proxy has been away for a moment. */
function outage(nowUnix) {
  const root = h("p", { class: "notice", role: "status", hidden: true });
  let timer = 0;
  return {
    root,
    show(link) {
      if (link === "live") {
        clearTimeout(timer);
        timer = 0;
        root.hidden = true;
      } else if (link === "ended") {
        root.hidden = false;
        put(root, "This session has ended. ", h("a", { href: "/" }, "Log in again"), " to go on.");
      } else if (link === "away" && !timer) {
        const since = clock(nowUnix(), nowUnix());
        timer = setTimeout(() => {
          root.hidden = false;
          say(root, `The proxy does not answer; it is tried again. What is shown is as of ${since}.`);
        }, PATIENCE_MS);
      }
    },
  };
}
