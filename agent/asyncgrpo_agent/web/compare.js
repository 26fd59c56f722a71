// Several runs on the same axes.

import * as api from "./api.js";
import { h, panel, put } from "./dom.js";
import { CHARTS, resolve } from "./metrics.js";
import { canPlot, Plot } from "./plot.js";
import { onTheme } from "./theme.js";

const SHOWN = ["reward", "ratio", "staleness", "time", "tokens", "queue"];
const POINTS = 300;
const STROKES = ["accent", "ink", "warn", "ok"];

export function compare() {
  const view = panel("compare", "Side by side");
  const grid = h("div", { class: "grid" });
  put(view.body, grid);
  let plots = [];
  let last = "";
  const forget = onTheme(() => plots.forEach((plot) => plot.redraw()));

  async function history(name) {
    const names = (await api.snapshot(name)).series_names;
    const wanted = SHOWN.map((key) => resolve(CHARTS.find((chart) => chart.key === key).lines[0], names));
    const answer = await api.series(name, wanted.filter(Boolean), POINTS);
    return { name, step: answer.step, columns: wanted.map((one) => answer.series[one]?.mean ?? []) };
  }

  function draw(histories) {
    plots.forEach((plot) => plot.close());
    const x = [...new Set(histories.flatMap((one) => one.step))].sort((a, b) => a - b);
    plots = SHOWN.map((key, index) => {
      const chart = CHARTS.find((one) => one.key === key);
      const lines = histories.map((one) => ({ label: one.name }));
      const plot = new Plot(chart.title, { lines, zero: chart.zero, axis: chart.axis, digits: chart.digits, unit: chart.unit, sync: "compare", strokes: STROKES, onZoom: (to) => plots.forEach((one) => one.zoom(to)) });
      plot.columns = histories.map((one) => {
        const at = new Map(one.step.map((step, place) => [step, one.columns[index][place] ?? null]));
        return { mean: x.map((step) => at.get(step) ?? null) };
      });
      return plot;
    });
    put(grid, plots.map((plot) => plot.root));
    plots.forEach((plot) => plot.show(x, plot.columns));
  }

  return {
    root: view.root,
    async show(names) {
      view.root.hidden = names.length < 1;
      if (!canPlot() || names.join() === last) return;
      last = names.join();
      const found = await Promise.all(names.map((name) => history(name).catch(() => null)));
      if (names.join() === last) draw(found.filter(Boolean));
    },
    close() { forget(); plots.forEach((plot) => plot.close()); },
  };
}
