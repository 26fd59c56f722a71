// The page of one run: loads it, follows it, and hands every change to the panels.

import * as api from "./api.js";
import { charts } from "./charts.js";
import { h } from "./dom.js";
import { events } from "./events.js";
import { facts } from "./facts.js";
import { follow } from "./live.js";
import { wanted } from "./metrics.js";
import { replicas } from "./replicas.js";
import { rollouts } from "./rollouts.js";
import { routing } from "./routing.js";
import { POINTS, Series } from "./series.js";
import { syncs } from "./syncs.js";
import { verdict } from "./verdict.js";

const SYNCS = 40; // that findings are made of

export async function runPage(name, who, nowUnix, onState) {
  let state = await api.snapshot(name);
  let history = new Series();
  let seen = 0; // a frame is asked for once
  let loading = false;
  const panels = {
    verdict: verdict(nowUnix), facts: facts(nowUnix), charts: charts(loadSeries), replicas: replicas(), syncs: syncs(name, nowUnix),
    routing: routing(), events: events(name, nowUnix), rollouts: rollouts(name, who.scopes.includes("rollouts"), nowUnix),
  };
  const root = [panels.verdict.root, panels.facts.root, panels.charts.root, panels.replicas.root, panels.syncs.root,
    h("div", { class: "side" }, panels.routing.root, panels.rollouts.root), panels.events.root];
  const dirty = new Set();

  function later(...which) {
    which.forEach((one) => dirty.add(one));
    if (!seen) seen = requestAnimationFrame(() => {
      seen = 0;
      for (const one of dirty) {
        if (one === "charts") panels.charts.show(history, state.series_names);
        else panels[one].show(state);
      }
      dirty.clear();
    });
  }

  async function loadSeries() {
    if (loading) return;
    loading = true;
    try {
      const names = wanted(state.series_names, panels.charts.extras());
      if (names.length) history = new Series(await api.series(name, names, POINTS));
      later("charts");
    } finally {
      loading = false;
    }
  }

  async function reload() {
    state = await api.snapshot(name);
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
  loadSeries();
  panels.rollouts.load();
  const stop = state.run.state === "past" ? (onState("past"), () => {}) : follow(name, state.seq, on, onState);
  return { root, close() { stop(); cancelAnimationFrame(seen); panels.charts.close(); } };
}
