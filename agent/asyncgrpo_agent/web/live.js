// Server-sent events of one run. The browser redials by itself and tells the last id it has seen.

import { liveUrl, me } from "./api.js";

const KINDS = ["snapshot", "step", "sync", "note", "rollout", "ended", "reload"];
const REDIAL_MS = [1000, 1000, 2000, 5000, 10000, 20000];

/**
 * Listens until it is closed by what this returns. `on(kind, data)` is called for each event, `onState`
 * with "live", "connecting", "away" or, when the session is over and nothing is tried any more, "ended".
 */
export function follow(name, seq, on, onState) {
  let source = null;
  let timer = 0;
  let failures = 0;
  let last = seq;
  let closed = false;

  function dial() {
    onState(failures === 0 ? "connecting" : "away");
    source = new EventSource(liveUrl(name, last));
    source.addEventListener("open", () => {
      failures = 0;
      onState("live");
    });
    source.addEventListener("error", () => {
      onState("away");
      if (source.readyState !== EventSource.CLOSED) return; // it redials by itself
      timer = setTimeout(again, REDIAL_MS[Math.min(failures, REDIAL_MS.length - 1)]);
      failures += 1;
    });
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) last = event.lastEventId;
        on(kind, event.data ? JSON.parse(event.data) : null);
      });
    }
  }

  /** An event source does not tell why it was refused. */
  async function again() {
    const over = await me().then(() => false, (error) => error.status === 401);
    if (closed) return;
    if (over) onState("ended");
    else dial();
  }

  dial();
  return () => {
    closed = true;
    clearTimeout(timer);
    source.close();
  };
}
