// usage: node screenshots.mjs CHROMIUM URL FOLDER JOIN_FILE
import { readFileSync } from "node:fs";
import { launch, logIn, open } from "../../tests/web/driver.mjs";

const [program, url, folder, join] = process.argv.slice(2);
const SETTLE_MS = 4000; // some steps, and no row that is still lit up
const browser = await launch(program);
const page = await open(browser, url, folder, { width: 1280, height: 900 });
const picture = (name, clip) => page.screenshot({ path: `${folder}/dashboard-${name}.png`, fullPage: true, clip });
await logIn(page, url, readFileSync(join, "utf8").trim());
await page.waitForTimeout(SETTLE_MS);
await picture("light");
await page.emulateMedia({ colorScheme: "dark" });
await page.waitForTimeout(300);
await picture("dark");
await page.setViewportSize({ width: 390, height: 844 });
await page.waitForTimeout(SETTLE_MS);
await picture("phone", { x: 0, y: 0, width: 390, height: 1900 });
await browser.close();
process.exit(0);
