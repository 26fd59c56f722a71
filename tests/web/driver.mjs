// A browser as a person has it, and a word with the test that started it.
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const PATIENCE_MS = 12_000;
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Has the test do something that a browser cannot. */
export async function ask(what) {
  console.log(JSON.stringify({ ask: what }));
  await answers.next();
}

export async function launch(program) {
  return chromium.launch({
    executablePath: program,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
}

/** A window with its own cookies; `faults` collects all that no page of ours may do. */
export async function open(browser, url, pictures, size = { width: 1360, height: 900 }) {
  mkdirSync(pictures, { recursive: true });
  const context = await browser.newContext({ ignoreHTTPSErrors: true, bypassCSP: false, viewport: size });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const faults = [];
  page.on("console", (message) => message.type() === "error" && faults.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => faults.push(`error: ${error.stack ?? error}`));
  page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("data:") || faults.push(`another host: ${request.url()}`));
  page.on("response", (answer) => answer.status() >= 400 && faults.push(`${answer.status()} ${answer.url()}`));
  return Object.assign(page, {
    faults,
    picture: (name) => page.screenshot({ path: `${pictures}/${name}.png`, fullPage: true }),
    api: (path) => page.evaluate((at) => fetch(at).then((answer) => answer.json()), path),
  });
}

export async function logIn(page, url, joinLine) {
  await page.goto(url);
  await page.getByLabel(/token/).fill(joinLine);
  await page.keyboard.press("Enter");
  await page.locator("canvas").first().waitFor();
}

/**
 * Until `look()` gives "": what is live may differ for a moment from what the proxy answers. Gives its
 * last word.
 */
export async function settled(look, patience_ms = PATIENCE_MS) {
  const end = Date.now() + patience_ms;
  for (;;) {
    const word = await look();
    if (word === "" || Date.now() > end) return word;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
}

/** What axe finds that is serious. */
export async function barriers(page) {
  await page.evaluate(AXE); // by the debugger, which no policy of the page concerns
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations
    .filter((rule) => ["serious", "critical"].includes(rule.impact))
    .map((rule) => `${rule.id}: ${rule.nodes.map((node) => node.html.slice(0, 160)).slice(0, 3).join(" | ")}`);
}

/** "" if they are equal. */
export const same = (what, shown, told) => (shown === told ? "" : `${what}: ${JSON.stringify(shown)} is shown, ${JSON.stringify(told)} is so`);
export const holds = (what, text, part) => (text.includes(part) ? "" : `${what}: ${JSON.stringify(part)} is not in ${JSON.stringify(text.slice(0, 300))}`);
export const first = (...words) => words.find((word) => word !== "") ?? "";
