// The charts of a run: one grid, one cursor, one range of steps.

import { choice } from "./choice.js";
import { h, panel, put, say } from "./dom.js";
import { number } from "./format.js";
import { CHARTS, chartOf, linesOf } from "./metrics.js";
import { canPlot, Plot } from "./plot.js";
import { runningMean, windowOf } from "./series.js";
import { onTheme } from "./theme.js";

const RANGES = [["", "All steps"], ["1000", "Last 1,000"], ["200", "Last 200"], ["50", "Last 50"]];
const KEY = "agrpo.charts";

/** `onMore(names)`: these metrics are to be asked for as well. */
export function charts(onMore) {
  const more = choice("more-metrics", "Add a chart of another metric", [["", "Add a metric …"]], add);
  const range = choice("chart-range", "Steps shown", RANGES, (value) => zoom(value ? { last: Number(value) } : null));
  const note = h("span", { class: "quiet" });
  const reset = h("button", { type: "button", hidden: true }, "Show all steps");
  reset.addEventListener("click", () => zoom(null));
  const view = panel("charts", "Training", note, h("div", { class: "tools" }, reset, range, more));
  const grid = h("div", { class: "grid" });
  put(view.body, grid);
  const plots = new Map(); // key -> {definition, names, plot}
  let extras = JSON.parse(localStorage.getItem(KEY) ?? "[]");
  let available = [];
  let shown = null; // the range: null, {last: n} or {from: [min, max]}
  let series = null;
  const forget = onTheme(() => plots.forEach(({ plot }) => plot?.redraw()));

  function add(name) {
    more.select.value = "";
    if (!name || extras.includes(name)) return;
    extras = [...extras, name];
    keep();
  }

  function remove(name) {
    extras = extras.filter((one) => one !== name);
    plots.get(`metric:${name}`)?.plot?.close();
    plots.get(`metric:${name}`)?.root.remove();
    plots.delete(`metric:${name}`);
    keep();
    more.select.focus();
  }

  function keep() {
    localStorage.setItem(KEY, JSON.stringify(extras));
    offer();
    onMore(extras);
  }

  function offer() {
    const drawn = new Set([...plots.values()].flatMap(({ names }) => names));
    const rest = available.filter((name) => !drawn.has(name) && !extras.includes(name));
    put(more.select, h("option", { value: "" }, "Add a metric …"), rest.map((name) => h("option", { value: name }, name)));
    more.hidden = !rest.length;
  }

  function zoom(to) {
    shown = to;
    reset.hidden = !(to && to.from);
    range.select.value = to?.last ? String(to.last) : "";
    plots.forEach(({ plot }) => plot?.zoom(bounds()));
  }

  function bounds() {
    if (!shown || !series?.step.length) return null;
    if (shown.from) return shown.from;
    return [Math.max(series.step[0], series.last - shown.last), series.last];
  }

  function build(definition) {
    const lines = linesOf(definition, available);
    const known = plots.get(definition.key);
    if (known && known.names.join() === lines.map((line) => line.name).join()) return known;
    known?.plot?.close();
    let made;
    if (!lines.length) {
      made = { root: h("figure", { class: "chart none" }, h("figcaption", {}, h("h3", {}, definition.title)), h("p", { class: "quiet" }, "Not logged by this run.")) };
    } else {
      if (definition.running) lines.unshift({ label: "running mean", stroke: "accent" }), (lines[1].thin = true), (lines[1].stroke = "accent");
      const tools = definition.extra ? [removal(definition)] : [];
      made = { plot: new Plot(definition.title, { ...definition, lines, sync: "steps", tools, onZoom: (to) => zoom(to && { from: to }) }) };
      made.root = made.plot.root;
    }
    const entry = { ...made, definition, names: lines.map((line) => line.name).filter(Boolean) };
    if (known) known.root.replaceWith(entry.root);
    else grid.append(entry.root);
    plots.set(definition.key, entry);
    return entry;
  }

  function removal(definition) {
    const button = h("button", { type: "button", class: "small", "aria-label": `Remove the chart of ${definition.title}` }, "Remove");
    button.addEventListener("click", () => remove(definition.title));
    return button;
  }

  function draw({ definition, names, plot }) {
    if (!plot) return;
    const columns = names.map((name) => series.lines.get(name) ?? null);
    if (definition.running && columns[0]) {
      const { bins, steps } = windowOf(series.step, definition.running);
      say(plot.legend.firstChild.childNodes[1], `mean of ${steps} steps `);
      columns.unshift({ mean: runningMean(columns[0].mean, bins) });
    }
    plot.show(series.step, columns);
    plot.zoom(bounds());
  }

  return {
    root: view.root,
    extras: () => extras,
    show(next, names) {
      series = next;
      available = names;
      if (!canPlot()) {
        put(view.body, h("p", { class: "notice" }, "The charts are missing: this tree lacks the chart library. ", h("code", {}, "scripts/web-install"), " puts it in place (it needs npm). All else on this page works without it."));
        return;
      }
      const definitions = [...CHARTS, ...extras.filter((name) => available.includes(name)).map(chartOf)];
      for (const definition of definitions) draw(build(definition));
      offer();
      say(note, series.step.length ? `${number(series.last)} steps${series.downSampled ? ", in bins: the line is the mean, the band least to greatest" : ""}` : "no step yet");
    },
    close() {
      forget();
      plots.forEach(({ plot }) => plot?.close());
    },
  };
}
