// The dashboard of a real proxy in Chromium, as a person with a viewer's join line has it.
// usage: node page.mjs CHROMIUM URL PICTURES JOIN_LINES_FILE CHECK ...
// Prints one JSON object for each check: {check, word} where the word is "" if all is well.
import { readFileSync } from "node:fs";
import { ask, barriers, first, holds, launch, logIn, open, same, settled } from "./driver.mjs";
import * as panels from "./panels.mjs";

const [program, url, pictures, joins, ...wanted] = process.argv.slice(2);
const [join, joinWithRollouts] = readFileSync(joins, "utf8").trim().split("\n");
const browser = await launch(program);
const page = await open(browser, url, pictures);
const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
const overflow = () => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
const [WHITE, BLACK] = ["rgb(244, 246, 247)", "rgb(14, 18, 20)"];

async function report(check, word) {
  console.log(JSON.stringify({ check, word }));
}

const CHECKS = {
  async login() {
    await page.goto(url);
    await page.picture("login");
    const found = await barriers(page);
    await logIn(page, url, join);
    return found.join("\n");
  },
  async runs() {
    const word = await panels.runs(page);
    await page.picture("runs");
    return first(word, (await barriers(page)).join("\n"));
  },
  async run() {
    await page.getByRole("link", { name: "math-7b" }).click();
    await page.locator("#replicas tbody tr").nth(40).waitFor();
    const unloaded = await page.locator("#loading").count();
    return first(same("address", new URL(page.url()).hash, "#/run/math-7b"), same("loading", unloaded, 0));
  },
  async live() {
    const before = await panels.step(page);
    return settled(async () => ((await panels.step(page)) > before ? "" : `step ${before} stays`));
  },
  async notes() {
    const { seq } = await page.api("/api/runs/math-7b");
    return settled(async () => {
      const [newest] = (await page.api("/api/runs/math-7b/events?limit=1")).events;
      return newest.seq > seq ? holds("event", await page.locator("#events").innerText(), newest.text) : "none comes";
    });
  },
  async light() {
    await page.picture("light");
    return first(same("ground", await ground(), WHITE), (await barriers(page)).join("\n"));
  },
  async dark() {
    await page.emulateMedia({ colorScheme: "dark" });
    const bySystem = await ground();
    await page.picture("dark");
    const found = await barriers(page);
    await page.emulateMedia({ colorScheme: "light" });
    const button = page.getByRole("button", { name: /^Theme/ });
    await button.focus();
    await page.keyboard.press("Enter");
    const bySwitch = await ground();
    await page.reload();
    await page.locator("canvas").first().waitFor();
    const after = await ground();
    await button.click(); // light, whatever the system is
    await button.click(); // as the system
    return first(same("by system", bySystem, BLACK), same("by switch", bySwitch, BLACK), same("after a reload", after, BLACK), same("back", await ground(), WHITE), found.join("\n"));
  },
  async keyboard() {
    await page.reload();
    await page.locator("#replicas tbody tr").nth(40).waitFor();
    await page.keyboard.press("Tab");
    const skip = await page.evaluate(() => document.activeElement.textContent);
    await page.keyboard.press("Enter");
    const main = await page.evaluate(() => document.activeElement.id);
    const chart = page.locator("#charts .plot").first();
    const reading = await settled(async () => { // the chart may still wait for its data
      await chart.focus();
      await page.keyboard.press("End");
      await page.keyboard.press("ArrowLeft");
      const read = await page.locator("#charts figure").first().locator("[aria-live]").innerText();
      return /^step [\d,]+: /.test(read) ? "" : `read: ${read}`;
    });
    await page.getByRole("listbox", { name: "Syncs, newest first" }).focus();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowDown");
    const chosen = await page.locator("#syncs .row[aria-selected=true] b").innerText();
    await page.locator("#replicas button.plain", { hasText: "r22" }).focus();
    await page.keyboard.press("Enter");
    const asked = await settled(async () => holds("its events", (await page.locator("#events .row .what").allInnerTexts()).join(), "r22 is GONE"));
    await page.getByPlaceholder("Find in events").fill("");
    return first(same("first stop", skip, "Skip to the content"), same("skipped to", main, "main"), reading,
      holds("chosen", await page.locator("#syncs .picture").innerText(), chosen), asked);
  },
  async phone() {
    await page.setViewportSize({ width: 360, height: 740 });
    await page.waitForFunction(() => document.querySelector("canvas").clientWidth < 360);
    const wide = await overflow();
    await page.picture("phone");
    const found = await barriers(page);
    await page.setViewportSize({ width: 1360, height: 900 });
    return first(same("sideways", Math.max(0, wide), 0), found.join("\n"));
  },
  async outage() {
    await page.evaluate(() => { window.stays = true; });
    const before = await panels.step(page);
    await ask("stop the proxy");
    const told = await settled(async () => holds("notice", await page.locator("main").innerText(), "The proxy does not answer"));
    const mark = holds("mark", await page.locator(".bar .link").innerText(), "not connected");
    const kept = (await page.locator("#replicas tbody tr").count()) > 40 ? "" : "what was known is gone";
    await page.picture("outage");
    await ask("start the proxy");
    const back = await settled(async () => first(holds("mark", await page.locator(".bar .link").innerText(), "live"), (await panels.step(page)) > before ? "" : "no steps"), 30_000);
    const replicas = await settled(async () => /4[67] ready of 50/.test(await page.locator("#replicas").innerText()) ? "" : "replicas are missing", 20_000);
    const gone = await page.getByText("The proxy does not answer").isHidden();
    const ours = (fault) => !/ERR_|40[14]|Failed to load/.test(fault); // the browser's own words on an outage
    page.faults.splice(0, page.faults.length, ...page.faults.filter(ours));
    return first(told, mark, kept, back, replicas, same("notice", gone, true), same("no reload by hand", await page.evaluate(() => window.stays), true));
  },
  async rollouts() {
    const closed = holds("without the scope", await page.locator("#rollouts").innerText(), "token create --role viewer --rollouts");
    const other = await open(browser, url, pictures);
    await logIn(other, url, joinWithRollouts);
    await other.goto(`${url}#/run/math-7b`);
    await other.locator("#rollouts").waitFor();
    return first(closed, await panels.rollouts(other));
  },
  async faults() {
    return page.faults.join("\n");
  },
};

for (const name of wanted) {
  const check = CHECKS[name] ?? panels[name];
  const began = Date.now();
  const word = await (name in CHECKS ? check() : check(page)).catch((error) => `failed: ${error}`);
  await report(name, word);
  console.error(`${name} ${Date.now() - began} ms ${word}`);
}
await browser.close();
process.exit(0); // standard input stays open
