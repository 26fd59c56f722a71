// usage: node view.mjs CHROMIUM URL JOIN_FILE RUN REPLICAS ROUNDS OLDEST_SYNC; asks once, while a page is open.
import { readFileSync } from "node:fs";
import { ask, launch, logIn, open } from "../../tests/web/driver.mjs";

const [program, url, join, run, replicas, rounds, oldest_version_text] = process.argv.slice(2);
const browser = await launch(program);
const page = await open(browser, url, "/tmp");
const oldest_version = Number(oldest_version_text);
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const address = `${url}#/run/${run}`;

/** When all that matters is there, and the frame with it has been drawn: seconds of navigation. */
async function paint(of) {
  await of.addInitScript((wanted) => {
    const look = () => {
      const charts = [...document.querySelectorAll("#charts .chart:not(.none)")];
      const filled = (one) => one.querySelector("canvas") && [...one.querySelectorAll(".legend b")].every((value) => value.textContent !== "–");
      const drawn = document.querySelector("#answer-why .sentence")?.textContent && charts.length >= 8 && charts.every(filled)
        && document.querySelectorAll("#replicas tbody tr").length >= wanted;
      if (drawn) requestAnimationFrame(() => setTimeout(() => { window.painted_ms = performance.now(); }));
      else requestAnimationFrame(look);
    };
    look();
  }, Number(replicas));
  await of.goto(address);
  await of.waitForFunction(() => window.painted_ms);
  return (await of.evaluate(() => window.painted_ms)) / 1000;
}

await logIn(page, url, readFileSync(join, "utf8").trim());
const state = await page.context().storageState();
const [cold, warm] = [[], []];
for (let round = 0; round < Number(rounds); round += 1) {
  const context = await browser.newContext({ ignoreHTTPSErrors: true, storageState: state, viewport: { width: 1360, height: 900 } });
  const first = await context.newPage();
  cold.push(await paint(first));
  await first.goto("about:blank");
  warm.push(await paint(first));
  await context.close();
}
const size = (path) => page.evaluate((at) => fetch(at).then((answer) => answer.arrayBuffer()).then((body) => body.byteLength), path);
const oldest = (await page.api(`/api/runs/${run}/syncs?before_version=${oldest_version + 1}&limit=1`)).syncs;
if (!oldest.length) throw new Error("the oldest sync is not known: the history was not told whole");
const names = (await page.api(`/api/runs/${run}`)).series_names;
const answers_bytes = {
  snapshot: await size(`/api/runs/${run}`),
  series: await size(`/api/runs/${run}/series?names=${names.slice(0, 16).join(",")}&points=600`),
  syncs: await size(`/api/runs/${run}/syncs?limit=100`),
  events: await size(`/api/runs/${run}/events?limit=200`),
};
await page.goto("about:blank");
await page.goto(address);
await page.locator("#charts canvas").first().waitFor();
await page.waitForTimeout(2000);
await ask("measure");
const live_bytes = await page.evaluate((at) => new Promise((done) => {
  const stop = new AbortController();
  let total = 0;
  setTimeout(() => stop.abort(), 10_000);
  fetch(at, { signal: stop.signal }).then(async (answer) => {
    for await (const chunk of answer.body) total += chunk.byteLength;
  }).catch(() => done(total));
}), `/api/runs/${run}/live`);
console.log(JSON.stringify({ paint_s: median(cold), paint_again_s: median(warm), answers_bytes, live_bytes_per_s: Math.round(live_bytes / 10) }));
await browser.close();
process.exit(0);
