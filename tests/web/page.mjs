// Opens the dashboard of a real proxy in Chromium, as a person with a viewer's join line would.
// usage: node page.mjs CHROMIUM URL JOIN_FILE PICTURES; prints one JSON object of what it saw.
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [program, url, joinFile, pictures] = process.argv.slice(2);
const seen = { console: [], failed: [], foreign: [], serious: [], headings: [], steps: [] };
mkdirSync(pictures, { recursive: true });

const browser = await chromium.launch({
  executablePath: program,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const context = await browser.newContext({ ignoreHTTPSErrors: true, bypassCSP: false });
const page = await context.newPage();
page.on("console", (message) => message.type() === "error" && seen.console.push(message.text()));
page.on("pageerror", (error) => seen.console.push(String(error)));
page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("data:")
  || seen.foreign.push(request.url()));
page.on("response", (answer) => answer.status() >= 400 && seen.failed.push(`${answer.status()} ${answer.url()}`));

const picture = (name) => page.screenshot({ path: `${pictures}/${name}.png`, fullPage: true });
const step = async () => Number.parseInt(
  (await page.locator("main").innerText()).match(/Step\s+(\d+)\s+of/)?.[1] ?? "-1", 10);

await page.goto(url);
await picture("login");
await page.fill("input[type=password]", readFileSync(joinFile, "utf8").trim());
await page.keyboard.press("Enter");
await page.getByRole("heading", { name: "Replicas" }).waitFor();
await page.locator("canvas").first().waitFor();
seen.steps.push(await step());
seen.headings = await page.getByRole("heading", { level: 2 }).allInnerTexts();
seen.replicas = await page.locator("main table tbody tr").count();
await page.waitForFunction((before) => {
  const found = document.querySelector("main").innerText.match(/Step\s+(\d+)\s+of/);
  return found && Number.parseInt(found[1], 10) > before;
}, seen.steps[0], { timeout: 15_000 });
seen.steps.push(await step());
await picture("light");
const search = page.getByPlaceholder("Find in events");
await search.fill("no event says this");
await page.getByText("sync.done").first().waitFor({ state: "hidden", timeout: 10_000 });
await search.fill("reached its quorum");
await page.getByText("sync.done").first().waitFor();

await page.emulateMedia({ colorScheme: "dark" });
await picture("dark");
seen.dark = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
await page.setViewportSize({ width: 360, height: 740 });
seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
await picture("phone");

await page.keyboard.press("Tab");
seen.focused = await page.evaluate(() => document.activeElement?.tagName);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
await page.evaluate(axe); // by the debugger, which no policy of the page concerns
const found = await page.evaluate(() => window.axe.run(document));
seen.serious = found.violations
  .filter((rule) => ["serious", "critical"].includes(rule.impact))
  .map((rule) => `${rule.id}: ${rule.nodes.map((node) => node.html.slice(0, 160)).slice(0, 3).join(" | ")}`);
await browser.close();
console.log(JSON.stringify(seen));
