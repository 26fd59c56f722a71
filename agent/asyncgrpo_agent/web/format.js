// Numbers as people read them. What is not known is an en dash, never a zero.

export const UNKNOWN = "–";

const FORMATS = new Map(); // to make one takes longer than to use it a thousand times

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Plain number with the digits that it deserves: 0.4213, 12.4, 1,204. */
export function number(value, digits) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  const places = digits ?? (size >= 100 || value === Math.round(value) ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
  if (size > 0 && size < 0.0005 && digits === undefined) return value.toExponential(1);
  const least = digits ?? 0;
  const key = 32 * least + places;
  if (!FORMATS.has(key)) FORMATS.set(key, new Intl.NumberFormat("en", { minimumFractionDigits: least, maximumFractionDigits: places }));
  return FORMATS.get(key).format(value);
}

/** A large count in few characters: 12.4 k, 3.1 M. */
export function compact(value) {
  if (!known(value)) return UNKNOWN;
  if (Math.abs(value) < 10000) return number(value, Math.abs(value) < 10 && value % 1 ? 1 : 0);
  const [unit, size] = Math.abs(value) < 1e6 ? ["k", 1e3] : Math.abs(value) < 1e9 ? ["M", 1e6] : ["G", 1e9];
  return `${number(value / size, 1)} ${unit}`;
}

export function percent(share) {
  if (!known(share)) return UNKNOWN;
  return `${number(100 * share, share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

/** A duration in seconds: 340 ms, 2.91 s, 4 min 10 s, 3 h 20 min, 2 d 4 h. */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${Math.max(1, Math.round(1000 * value))} ms`;
  if (value < 59.95) return `${number(value, value < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(value);
  const steps = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  for (const [size, unit, less, lesser] of steps) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / less);
    return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${lesser}` : ""}`;
  }
  return `${whole} s`;
}

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 1e3) return `${value} B`;
  const [unit, size] = value < 1e6 ? ["kB", 1e3] : value < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  return `${number(value / size, value / size < 99.5 ? 1 : 0)} ${unit}`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** The time of day, with the day in front if it is not `now`'s. */
export function clock(unix_s, now_unix_s) {
  if (!known(unix_s)) return UNKNOWN;
  const date = new Date(1000 * unix_s);
  const same = new Date(1000 * now_unix_s).toDateString() === date.toDateString();
  return same ? CLOCK.format(date) : `${DAY.format(date)} ${CLOCK.format(date)}`;
}

export function stamp(unix_s) {
  return known(unix_s) ? new Date(1000 * unix_s).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC") : UNKNOWN;
}

/** A value with its unit, where the unit may be one that has a form of its own. */
export function quantity(value, unit = "") {
  if (typeof value === "string") return value;
  if (!known(value)) return UNKNOWN;
  if (unit === "s" || unit === "seconds") return seconds(value);
  if (unit === "share" || unit === "ratio of 1") return percent(value);
  if (unit === "bytes" || unit === "B") return bytes(value);
  return `${number(value)}${unit ? ` ${unit}` : ""}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** "v812" of a sync's row, a number or an adapter's name. */
export function version(value) {
  if (known(value)) return `v${value}`;
  const match = /v(\d+)/.exec(String(value ?? ""));
  return match ? `v${Number(match[1])}` : String(value || UNKNOWN);
}
