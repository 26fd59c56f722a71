// Server-sent events of one run. The browser redials by itself and tells the last id it has seen.

import { liveUrl } from "./api.js";

const KINDS = ["snapshot", "step", "sync", "note", "rollout", "ended", "reload"];
const REDIAL_MS = [1000, 2000, 5000, 10000, 30000];

/**
 * Listens until `close()`. `on(kind, data)` is called for each event, `onState` with "live",
 * "connecting" or "away".
 */
export function follow(name, seq, on, onState) {
  let source = null;
  let timer = 0;
  let failures = 0;
  let last = seq;

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
      timer = setTimeout(dial, REDIAL_MS[Math.min(failures, REDIAL_MS.length - 1)]);
      failures += 1;
    });
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) last = event.lastEventId;
        on(kind, event.data ? JSON.parse(event.data) : null);
      });
    }
  }

  dial();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
