// One chart: uPlot with our colours, a band of least and greatest, a legend, and keys.

import { h, put, say } from "./dom.js";
import { number, quantity, UNKNOWN } from "./format.js";
import { colour } from "./theme.js";

const DASHES = [[], [], [4, 3], [1, 3]];
const STROKES = ["accent", "ink-2", "ink-2", "ink-3"];
const HEIGHT = 148;

/** Whether the library is there: it is not part of a source tree until scripts/web-install has run. */
export const canPlot = () => typeof window.uPlot === "function";

/**
 * `lines`: [{label, name, thin}]. `onZoom(min, max)` when a range of steps is chosen here, and
 * `onRead(step)` when the cursor moves by keys.
 */
export class Plot {
  constructor(title, { lines, axis = null, zero = false, digits, unit = "", sync, onZoom, tools = [], strokes = STROKES, noun = "step" }) {
    Object.assign(this, { title, lines, axis, zero, digits, unit, strokes, noun });
    this.onZoom = onZoom;
    this.legend = h("span", { class: "legend" });
    this.values = lines.map(() => h("b", {}, UNKNOWN));
    put(this.legend, lines.map((line, index) => this.legendItem(line, index)));
    this.host = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    this.spoken = h("span", { class: "unseen", "aria-live": "polite" });
    this.root = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title), ...tools, this.legend), this.host, this.spoken);
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.data = null;
    this.range = null;
    this.plot = null;
    this.syncKey = sync;
    this.width = 0;
    this.observer = new ResizeObserver(([entry]) => this.resize(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.host); // who asked for the width would have the page laid out at once
  }

  legendItem(line, index) {
    const swatch = h("i", { class: `swatch dash-${line.thin ? 0 : Math.min(index, 3)}${line.thin ? " thin" : ""}`, style: { borderColor: `var(--${this.stroke(index)})` } });
    const name = line.name && line.name !== line.label ? h("code", { title: line.label }, line.name) : null;
    return h("span", {}, swatch, line.label ? `${line.label} ` : "", name, " ", this.values[index]);
  }

  stroke(index) {
    return this.lines[index].stroke ?? this.strokes[index % this.strokes.length];
  }

  format(value) {
    if (value === null || value === undefined) return UNKNOWN;
    return this.unit === "s" ? quantity(value, "s") : number(value, this.digits);
  }

  /** `x`: steps. `columns`: one {mean, min, max} for each line, or null where it is not logged. */
  show(x, columns) {
    const band = columns[0]?.min && columns[0].min !== columns[0].mean;
    this.data = [x, ...columns.map((one) => one?.mean ?? x.map(() => null))];
    if (band) this.data.push(columns[0].min, columns[0].max);
    this.band = Boolean(band);
    if (this.plot && this.plot.series.length === this.data.length) this.plot.setData(this.data, false);
    else this.build();
    this.rescale();
    this.tell();
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.width || !this.data[0].length) return; // not laid out yet; resize() builds it
    put(this.host);
    this.plot = new window.uPlot(this.options(), this.data, this.host);
  }

  options() {
    const series = this.lines.map((line, index) => ({
      label: line.label, width: line.thin ? 1 : 1.6, dash: line.thin ? [] : DASHES[Math.min(index, 3)],
      stroke: () => colour(this.stroke(index)), alpha: line.thin ? 0.42 : 1, points: { show: false }, spanGaps: true,
    }));
    const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    const bands = this.band
      ? [{ series: [series.length + 2, series.length + 1], fill: () => `color-mix(in srgb, ${colour(this.stroke(0))} 16%, transparent)` }]
      : [];
    const axis = { stroke: () => colour("ink-3"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => colour("grid"), width: 1 } };
    return {
      width: this.width, height: HEIGHT, legend: { show: false }, padding: [8, 18, 0, 0],
      cursor: {
        sync: { key: this.syncKey, setSeries: false }, y: false, drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
      },
      select: { show: true },
      scales: { x: { time: false }, y: { range: (_plot, low, high) => this.bounds(low, high) } },
      axes: [
        { ...axis, size: 24, values: (_plot, splits) => splits.map((one) => (one % 1 ? "" : number(one))) },
        { ...axis, size: 52, values: (_plot, splits) => splits.map((one) => this.mark(one, splits)) },
      ],
      series: [{}, ...series, ...(this.band ? [edge, edge] : [])],
      bands,
      hooks: {
        setCursor: [(plot) => this.values.forEach((node, index) => say(node, this.format(this.valueAt(index, plot.cursor.idx))))],
        setSelect: [(plot) => this.selected(plot)],
      },
    };
  }

  mark(value, splits) {
    if (this.axis) return value.toFixed(3);
    const step = Math.abs((splits[1] ?? 1) - (splits[0] ?? 0));
    if (Math.abs(value) >= 10000) return `${number(value / 1000)} k`;
    return number(value, step >= 1 ? 0 : Math.min(4, Math.ceil(-Math.log10(step))));
  }

  /** The axis of `ratio` is fixed, as long as it holds the line. */
  bounds(low, high) {
    if (low === null || high === null) return this.axis ?? [0, 1];
    if (this.axis) {
      const shown = this.lines.map((_line, index) => this.extent(index)).filter(([least]) => Number.isFinite(least)).flat();
      return [Math.min(this.axis[0], ...shown), Math.max(this.axis[1], ...shown)];
    }
    const bottom = this.zero ? Math.min(0, low) : low;
    const room = (high - bottom || Math.abs(high) || 1) * 0.08;
    return [this.zero && low >= 0 ? 0 : bottom - room, high + room];
  }

  extent(index) {
    const values = (this.data[index + 1] ?? []).filter((value) => value !== null);
    return values.length ? [Math.min(...values), Math.max(...values)] : this.axis ?? [0, 1];
  }

  valueAt(index, at) {
    const column = this.data?.[index + 1] ?? [];
    if (at !== null && at !== undefined) return column[at];
    for (let place = column.length - 1; place >= 0; place -= 1) if (column[place] !== null) return column[place];
    return null;
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom?.(range);
  }

  /** Shows `[first, last]` step, or all with null. */
  zoom(range) {
    this.range = range;
    this.rescale();
  }

  rescale() {
    const x = this.data?.[0];
    if (!this.plot || !x?.length) return;
    const [min, max] = this.range ?? [x[0], x.at(-1)];
    this.plot.setScale("x", { min, max: Math.max(max, min + 1) });
  }

  key(event) {
    const x = this.data?.[0];
    if (!this.plot || !x?.length) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return void this.onZoom?.(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = this.plot.cursor.idx ?? x.length - 1;
    const at = Math.max(0, Math.min(x.length - 1, from + moves[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(x[at], "x"), top: 10 });
    const parts = this.lines.map((line, index) => `${line.label || this.title} ${this.format(this.valueAt(index, at))}`);
    say(this.spoken, `${this.noun} ${number(x[at])}: ${parts.join(", ")}`);
  }

  tell() {
    this.values.forEach((node, index) => say(node, this.format(this.valueAt(index, this.plot?.cursor.idx))));
    const x = this.data[0];
    const parts = this.lines.map((line, index) => {
      const [low, high] = this.extent(index);
      return `${line.label || this.title}: now ${this.format(this.valueAt(index, null))}, from ${this.format(low)} to ${this.format(high)}`;
    });
    this.host.setAttribute("aria-label", x.length ? `${this.title}, ${this.noun} ${number(x[0])} to ${number(x.at(-1))}. ${parts.join("; ")}. Arrow keys read single values.` : `${this.title}: nothing logged yet`);
  }

  resize(width) {
    const same = width === this.width;
    this.width = width;
    if (!width || !this.data || (same && this.plot)) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else {
      this.build();
      this.rescale();
    }
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}
