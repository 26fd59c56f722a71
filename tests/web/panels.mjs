// Each panel shows what the proxy answers. Every check gives "" or what is wrong.
import { first, holds, same, settled } from "./driver.mjs";

const RUN = "/api/runs/math-7b";
const text = (page, selector) => page.locator(selector).innerText();
const said = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });

/** As the page words a duration; written down anew here, for the test. */
function duration(seconds) {
  if (seconds < 0.9995) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
}

export async function verdict(page) {
  return settled(async () => {
    const { verdict: told } = await page.api(RUN);
    const shown = await text(page, "#answer-why");
    return first(holds("verdict", shown, told.sentence), ...told.advice.map((one) => holds("advice", shown, one)), holds("evidence", shown, "of 512 samples"));
  });
}

/** The three questions that somebody who has never seen the page comes with. */
export async function answers(page) {
  return settled(async () => {
    const why = await text(page, "#answer-why");
    const holdup = await text(page, "#answer-holdup");
    const policy = await text(page, "#answer-policy");
    return first(holds("why", why, "Generation-bound: the trainer waited 61%"), holds("straggler", holdup, "r17 came last in"), holds("phase", holdup, "Most of it: read, 1."),
      holds("refuser", holdup, "r31 has not taken v"), /(46|45) of 4\d replicas hold v\d+( or newer)?, as announced; r31 does not/.test(policy) ? "" : `policy: ${policy}`,
      holds("newest", policy, `v${(await page.api(RUN)).syncs[0].version}`));
  });
}

export async function alerts(page) {
  return settled(async () => {
    const [told] = (await page.api(RUN)).alerts;
    if (!told) return "no alert yet";
    const shown = await text(page, ".alerts");
    return first(holds("alert", shown, told.sentence), holds("fix", shown, told.fix), holds("severity", shown, told.severity), holds("since", shown, "since "));
  });
}

export async function metrics(page) {
  const charts = { Reward: "reward", "Importance ratio": "ratio", Staleness: "sample/staleness_mean", "Rollout queue": "sample/rollout_queue_size", "Time of a step": "perf/step_s", "Tokens a second": "rollout/generated_tok_s" };
  return settled(async () => {
    const told = await page.api(`${RUN}/series?names=${Object.values(charts).join(",")}&points=2000`);
    const newest = (name) => told.series[name].mean.at(-1);
    const shown = (title) => page.locator("figure.chart", { has: page.getByRole("heading", { name: title, exact: true }) }).locator(".legend").innerText();
    return first(holds("ratio", await shown("Importance ratio"), newest("ratio").toFixed(4)), holds("step", await shown("Time of a step"), `perf/step_s ${newest("perf/step_s").toFixed(1)} s`),
      holds("queue", await shown("Rollout queue"), said(newest("sample/rollout_queue_size"))), holds("tokens", await shown("Tokens a second"), newest("rollout/generated_tok_s").toLocaleString("en", { maximumFractionDigits: 0 })),
      holds("running mean", await shown("Reward"), "mean of"), same("canvases", await page.locator("#charts canvas").count(), 9));
  });
}

export async function replicas(page) {
  return settled(async () => {
    const told = (await page.api(RUN)).replicas;
    const rows = await page.locator("#replicas tbody tr").evaluateAll((all) => all.map((row) => [...row.children].map((cell) => cell.innerText.replace(/\s+/g, " ").trim())));
    const row = (name) => rows.find(([first]) => first.split(" ")[0] === name) ?? [];
    const looked = rows.slice(0, 7).map(([name]) => name).sort();
    const one = told.find((replica) => replica.name === "r03");
    return first(same("rows", rows.length, told.length), same("to look at", looked.join(), ["r08 suspect", "r09 clock", "r17 slow to sync", "r31 refuses", "r40 draining", "r49 joining", "r50 joining"].join()),
      holds("state", row("r03")[1] ?? "", "ready"), holds("newest", row("r03")[2] ?? "", `v${one.newest_version}`), holds("capacity", row("r03")[4] ?? "", "of 64"), holds("source", row("r03").join(), "bucket"),
      holds("failures", row("r08")[8] ?? "", `of ${told.find((replica) => replica.name === "r08").requests}`), holds("skew", row("r09")[10] ?? "", "s"), holds("digest", row("r31")[3] ?? "", "refused"), holds("price", row("r03").at(-1) ?? "", "1.90"));
  });
}

export async function syncs(page) {
  await page.locator("#syncs .row").nth(4).click();
  return settled(async () => {
    const shown = await text(page, "#syncs .picture");
    const version = Number(/v(\d+)/.exec(shown)[1]);
    const told = (await page.api(`${RUN}/syncs?before_version=${version + 1}&limit=1`)).syncs[0];
    const slowest = told.replicas.filter((one) => one.ok).sort((a, b) => b.since_announced_s - a.since_announced_s)[0];
    const lines = await page.locator("#syncs .waterfall li").allInnerTexts();
    const last = lines.find((line) => line.includes(" last")) ?? "";
    return first(same("sync", told.version, version), holds("took", shown, duration(told.elapsed_s)), holds("quorum", shown, duration(told.quorum_s)), holds("size", shown, "41.9 MB"), holds("digest", shown, told.digest.slice(0, 12)),
      /Generation paused\s+0 s/.test(shown) ? "" : `paused: ${shown}`, same("last", last.trim().split(/\s/)[0], slowest.name), holds("its time", last, duration(slowest.since_announced_s)), same("straggler", slowest.name, "r17"),
      holds("refusal", lines.join("\n"), "the sha256 of adapter_model"), lines.length > told.replicas.length ? "" : `${lines.length} lines`, await page.locator("#syncs .bar.tone-4").count() > 40 ? "" : "few bars of loads");
  });
}

export async function routing(page) {
  return settled(async () => {
    const told = (await page.api(RUN)).routing;
    const total = Object.values(told.shares).reduce((sum, one) => sum + one, 0);
    const shown = await text(page, "#routing");
    return first(...["affinity", "least loaded"].map((name) => holds(name, shown, `${Math.round((100 * told.shares[name]) / total)} %`)), holds("limit", shown, "limit "),
      holds("retried", shown.replace(/\s+/g, " "), `Sent again ${told.retried}`), holds("sends", shown.replace(/\s+/g, " "), `Sends for a success ${(1 + told.retries_per_success).toFixed(2)}`));
  });
}

export async function events(page) {
  const list = () => page.locator("#events .row .what").allInnerTexts();
  const kind = page.getByLabel("Kind of event");
  const find = page.getByPlaceholder("Find in events");
  await kind.selectOption("replica");
  let word = await settled(async () => {
    const told = (await page.api(`${RUN}/events?kind=replica&limit=1`)).events[0];
    const shown = await list();
    return first(same("newest of the kind", shown[0], told.text), shown.some((one) => one.startsWith("Sync of")) ? "a sync is among them" : "");
  });
  await find.fill("r22");
  word ||= await settled(async () => {
    const shown = await list();
    return first(shown.length ? "" : "none", shown.every((one) => one.includes("r22")) ? "" : "others", shown.some((one) => one.includes("r22 is GONE")) ? "" : "no loss");
  });
  await page.locator("#events .row", { hasText: "GONE" }).first().click();
  word ||= holds("detail", await text(page, "#events .detail"), "duration");
  await kind.selectOption("");
  await find.fill("no event says this");
  word ||= await settled(async () => same("rows", (await list()).length, 0));
  await find.fill("");
  await page.getByLabel("Severity").selectOption("1");
  word ||= await settled(async () => first((await list()).length ? "" : "none", await page.locator("#events .row .is-quiet").count() ? "information among warnings" : ""));
  await page.getByLabel("Severity").selectOption("0");
  return word;
}

export async function filterOfReplicas(page) {
  const names = () => page.locator("#replicas tbody tr button.plain").allInnerTexts();
  await page.getByPlaceholder("Find a replica").fill("r1");
  let word = await settled(async () => same("by name", (await names()).length, 10));
  await page.getByPlaceholder("Find a replica").fill("");
  await page.locator("#replica-state").selectOption("JOINING");
  word ||= await settled(async () => same("by state", (await names()).join(), "r49,r50"));
  await page.locator("#replica-state").selectOption("");
  await page.locator("#replicas th button", { hasText: "Tokens/s" }).click();
  const rates = () => page.locator("#replicas td:nth-child(6)").allInnerTexts();
  word ||= await settled(async () => {
    const shown = (await rates()).map((one) => Number.parseFloat(one.replace(",", "")) * ({ k: 1e3, M: 1e6 }[one.at(-1)] ?? 1));
    return shown.every((value, index) => index === 0 || value <= shown[index - 1]) ? "" : `not sorted: ${shown}`;
  });
  await page.locator("#replicas th button", { hasText: "Replica" }).click();
  return word;
}

/** Rows are kept: what is focused and selected in them stays. */
export async function focus(page) {
  const name = page.locator("#replicas button.plain", { hasText: "r05" });
  await name.focus();
  await page.evaluate(() => {
    const cell = [...document.querySelectorAll("#replicas tbody tr")].find((row) => row.innerText.startsWith("r12")).children[13];
    getSelection().selectAllChildren(cell);
  });
  const before = await step(page);
  const word = await settled(async () => ((await step(page)) >= before + 2 ? "" : "no steps come"));
  const [focused, selected] = await page.evaluate(() => [document.activeElement.innerText, getSelection().toString().trim()]);
  return first(word, same("focused", focused, "r05"), same("selected", selected, "0.1.0"));
}

export const step = async (page) => Number(/Step\s+([\d,]+)\s+of/.exec(await text(page, "main"))?.[1].replaceAll(",", "") ?? -1);

export async function runs(page) {
  const word = await settled(async () => {
    const told = (await page.api("/api/runs")).runs;
    const shown = (await text(page, "#runs")).replace(/\s+/g, " ");
    return first(...told.flatMap((run) => [holds("name", shown, run.name), holds("state", shown, run.state), run.verdict ? holds("verdict", shown, run.verdict.sentence.slice(0, 60)) : "", holds("replicas", shown, `${run.ready} of ${run.registered}`)]));
  });
  const beside = await settled(async () => {
    const legends = await page.locator("#compare .legend").allInnerTexts();
    return first(same("charts", legends.length, 6), ...legends.map((one) => first(holds("one", one, "math-7b"), holds("other", one, "code-1b"), one.includes("–") ? `a value is missing: ${one}` : "")));
  });
  await page.getByLabel("Compare pilot").check();
  const three = await settled(async () => holds("third", (await page.locator("#compare .legend").allInnerTexts()).join(), "pilot 0."));
  return first(word, beside, three);
}

/** The back end is scripted here: what a page does with rollouts that it may read. */
export async function rollouts(page) {
  const one = { t_unix_s: Date.now() / 1000, version: 7, replica: "r03", prompt: "What is <b>6 x 7</b>?", completion: "It is 42.", tokens: 5, rewards: { exact: 1, format: 0.5 }, seconds: 1.25 };
  await page.route("**/rollouts?**", (route) => route.fulfill({ json: { rollouts: [one] } }));
  await page.reload();
  return settled(async () => {
    const shown = await text(page, "#rollouts");
    return first(...[one.prompt, one.completion, "v7", "r03", "5 tokens", "1.25 s", "exact", "0.5"].map((part) => holds("rollout", shown, part)));
  });
}
