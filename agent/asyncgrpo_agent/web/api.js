// What the proxy is asked. Every answer is JSON; an error has a sentence and a fix.

export class ApiError extends Error {
  constructor(status, message, fix = "") {
    super(message);
    this.status = status;
    this.fix = fix;
  }
}

/** The answer that index.html has asked for already; it serves once. */
function early(path) {
  const answer = window.asked?.get(path);
  window.asked?.delete(path);
  return answer;
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await (early(path) ?? fetch(path, { credentials: "same-origin", ...options }));
  } catch {
    throw new ApiError(0, "The proxy does not answer.", "It is tried again; is the proxy running?");
  }
  if (response.status === 401) throw new ApiError(401, "This session has ended.", "Log in again.");
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new ApiError(response.status, told.error ?? `The proxy answered ${response.status}.`, told.fix);
  }
  return response.status === 204 ? null : response.json();
}

const run = (name) => `/api/runs/${encodeURIComponent(name)}`;
const query = (values) => new URLSearchParams(
  Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined),
);

export const me = () => ask("/api/me");
export const runs = async () => (await ask("/api/runs")).runs;
export const snapshot = (name) => ask(run(name));
export const series = (name, names, points) => ask(`${run(name)}/series?${query({ names: names.join(","), points })}`);
export const syncs = async (name, before_version, limit = 200) =>
  (await ask(`${run(name)}/syncs?${query({ before_version, limit })}`)).syncs;
export const events = async (name, { before_seq, kind, text, limit = 200 }) =>
  (await ask(`${run(name)}/events?${query({ before_seq, limit, kind, text })}`)).events;
export const rollouts = async (name, limit = 50) => (await ask(`${run(name)}/rollouts?${query({ limit })}`)).rollouts;
export const liveUrl = (name, seq) => `${run(name)}/live?${query({ seq })}`;
export const logout = () => ask("/logout", { method: "POST" });
