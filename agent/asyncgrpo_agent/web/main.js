// The bar on top, and which page is shown: #/runs, or #/run/NAME.

import * as api from "./api.js";
import { choice } from "./choice.js";
import { h, put } from "./dom.js";
import { stateMark } from "./icons.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { themeSwitch } from "./theme.js";

const SECTIONS = [["charts", "Training"], ["replicas", "Replicas"], ["syncs", "Syncs"], ["routing", "Routing"], ["rollouts", "Rollouts"], ["events", "Events"]];
const LINK = { live: ["READY", "live"], connecting: ["JOINING", "connecting"], away: ["SUSPECT", "not connected, trying"], ended: ["failed", "session ended"], past: ["past", "past run"] };

const bar = document.getElementById("bar");
const main = document.getElementById("main");
const link = h("span", { class: "link", role: "status" });
const nav = h("nav", { "aria-label": "Parts of the page" }, SECTIONS.map(([id, word]) => jump(id, word)));
let page = null;
let who = null;
let ahead_s = 0; // of the proxy's clock before this one's

const nowUnix = () => Date.now() / 1000 + ahead_s;

function jump(id, word) {
  const anchor = h("a", { href: `#${id}` }, word);
  anchor.addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById(id)?.scrollIntoView();
    document.querySelector(`#${id} h2`)?.focus?.();
  });
  return anchor;
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which page it is
  main.focus();
});

function onState(state) {
  put(link, stateMark(...LINK[state]));
}

const named = () => {
  const match = /^#\/run\/(.+)$/.exec(location.hash);
  return match ? decodeURIComponent(match[1]) : "";
};

async function start() {
  const early = named() ? api.snapshot(named()) : null; // what takes longest is asked for first
  early?.catch(() => {}); // whoever waits for it is told
  const [me, runs] = await Promise.all([api.me(), api.runs()]);
  who = me;
  ahead_s = who.now_unix_s - Date.now() / 1000;
  const names = runs.map((run) => run.name);
  const select = choice("run", "Run", [["", "All runs"], ...names.map((name) => [name, name])], (name) => {
    location.hash = name ? `#/run/${encodeURIComponent(name)}` : "#/runs";
  });
  const out = h("button", { type: "button" }, "Log out");
  out.addEventListener("click", () => api.logout().finally(() => location.assign("/")));
  put(bar, h("a", { class: "name", href: "#/runs" }, "asyncgrpo", h("span", {}, "-agent")), select, link, nav, h("div", { class: "end" }, themeSwitch(), out));
  addEventListener("hashchange", () => route(select.select, names));
  await route(select.select, names, early);
}

async function route(select, names, early = null) {
  const name = named() || (names.length === 1 && location.hash !== "#/runs" ? names[0] : "");
  page?.close();
  page = null;
  select.value = name;
  nav.hidden = !name;
  put(link);
  try {
    page = name ? await runPage(name, who, nowUnix, onState, early) : runsPage(nowUnix);
    put(main, h("h1", { class: "unseen" }, name ? `Run ${name}` : "Runs"), page.root);
    document.title = `${name || "Runs"} · asyncgrpo-agent`;
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  const known = error instanceof api.ApiError;
  const again = h("button", { type: "button" }, error.status === 401 ? "Log in" : "Try again");
  again.addEventListener("click", () => location.reload());
  put(main, h("section", { class: "panel pad" }, h("h1", {}, known ? error.message : "This page has failed."), h("p", { class: "soft" }, known ? error.fix : String(error)), again));
  if (!known) throw error;
}

start().catch(fail);
