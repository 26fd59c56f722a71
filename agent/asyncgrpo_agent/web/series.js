// The history of a run's metrics: the proxy's bins, and live steps appended to them.

export const POINTS = 600;
const GROWTH = 300; // live steps after which the bins are asked for anew

export class Series {
  constructor(answer = { step: [], series: {}, unix_s: [] }) {
    this.step = [...answer.step];
    this.unix_s = [...(answer.unix_s ?? [])];
    this.lines = new Map(Object.entries(answer.series).map(([name, line]) => [
      name, { mean: [...line.mean], min: [...(line.min ?? line.mean)], max: [...(line.max ?? line.mean)] },
    ]));
    this.downSampled = Boolean(answer.down_sampled);
    this.appended = 0;
  }

  get last() {
    return this.step.at(-1) ?? null;
  }

  /** Adds a step; false if it does not follow the last one, and all has to be asked for again. */
  append({ step, unix_s, values }) {
    if (this.last !== null && step <= this.last) return step === this.last;
    this.step.push(step);
    this.unix_s.push(unix_s);
    for (const [name, line] of this.lines) {
      const value = values[name] ?? null;
      for (const part of Object.values(line)) part.push(value);
    }
    this.appended += 1;
    return this.appended <= GROWTH && Object.keys(values).some((name) => this.lines.has(name));
  }

  newest(name) {
    const mean = this.lines.get(name)?.mean ?? [];
    for (let index = mean.length - 1; index >= 0; index -= 1) if (mean[index] !== null) return mean[index];
    return null;
  }
}

/** How many bins make up `steps` steps of this history, and how many steps that is. */
export function windowOf(step, steps) {
  if (step.length < 2) return { bins: 1, steps: 1 };
  const width = Math.max(1, (step.at(-1) - step[0]) / (step.length - 1));
  const bins = Math.max(Math.min(step.length, 5), Math.round(steps / width));
  return { bins, steps: Math.round(bins * width) };
}

/** The mean of the last `count` values that were logged, at each place. */
export function runningMean(values, count) {
  const window = [];
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    window.push(value);
    total += value;
    if (window.length > count) total -= window.shift();
    return total / window.length;
  });
}
