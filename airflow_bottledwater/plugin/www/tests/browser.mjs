// Steps of tests/system/test_page.py: node tests/browser.mjs STEP, with AIRFLOW (url, user, password) and IMAGES (a folder).
import { chromium } from "playwright-core";

const { password, url, user } = JSON.parse(process.env.AIRFLOW);
const browser = await chromium.launch({ args: ["--no-sandbox"], executablePath: "/usr/bin/chromium" });
const TIMEOUT = 120_000;

const failed = [];
const open = async (theme, width = 1000) => {
  const context = await browser.newContext({ colorScheme: theme, viewport: { height: 900, width } });
  const page = await context.newPage();
  page.setDefaultTimeout(TIMEOUT);
  page.on("pageerror", (error) => failed.push(String(error)));
  page.on("request", (request) => {
    const asked = request.url();
    if (!asked.startsWith(url) && !asked.startsWith("data:") && !asked.startsWith("blob:")) failed.push(`asked for ${asked}`);
  });
  await page.goto(`${url}/auth/login`);
  await page.fill("input[name=username]", user);
  await page.fill("input[name=password]", password);
  await page.click("button[type=submit]");
  await page.waitForURL((found) => !String(found).includes("/auth/"));
  return page;
};

/** No part is wider than the window: nothing has to be scrolled sideways. */
const fits = async (page) => {
  const [needed, given] = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  if (needed > given) failed.push(`${needed} px are needed and ${given} given`);
};

const one = async (page) => {
  await page.goto(`${url}/plugin/bottledwater`);
  await page.getByRole("link", { exact: true, name: "orders" }).click();
  await page.getByText("Row changes in a second").waitFor();
};

const steps = {
  empty: async () => {
    const page = await open("light");
    await page.goto(`${url}/plugin/bottledwater`);
    await page.getByText("There is no pipeline yet.").waitFor();
    await page.goto(url);
    await page.getByText("No pipeline yet.").waitFor();
  },
  running: async () => {
    for (const theme of ["light", "dark"]) {
      const page = await open(theme);
      await page.goto(url);
      await page.getByText("1 pipeline is as meant.").waitFor();
      await one(page);
      await page.locator("canvas").nth(3).waitFor();
      await page.getByRole("button", { name: "1 hour" }).click();
      await page.getByRole("button", { name: "15 min" }).click();
      await page.locator("canvas").nth(3).waitFor();
      await page.getByRole("cell", { exact: true, name: "public.orders" }).waitFor();
      // the samples of a minute
      if (theme === "light") await page.waitForTimeout(45_000);
      await fits(page);
      // at half width, too, a legend is one line
      const heights = await page.locator(".u-legend").evaluateAll((found) => found.map((each) => each.clientHeight));
      if (heights.length < 4 || Math.max(...heights) > 30) failed.push(`the legends have ${heights} px`);
      await page.screenshot({ path: `${process.env.IMAGES}/page${theme === "dark" ? "-dark" : ""}.png` });
      await page.goto(`${url}/dags/bottledwater/plugin/bottledwater-dag`);
      await page.getByRole("heading", { exact: true, name: "orders" }).waitFor();
    }
  },
  letters: async () => {
    const page = await open("light");
    await page.goto(`${url}/plugin/bottledwater`);
    await page.getByText("1 of 1 needs you.").waitFor();
    await one(page);
    const letters = page.getByRole("table", { name: "Dead letters" });
    await letters.getByRole("cell", { exact: true, name: "id = -1" }).waitFor();
    await letters.getByText("max.message.bytes").waitFor();
    await fits(page);
    await letters.screenshot({ path: `${process.env.IMAGES}/dead-letters.png` });
  },
  pause: async () => {
    const page = await open("light");
    await one(page);
    for (const [name, then] of [["Pause tables", "paused"], ["Go on with tables", ""]]) {
      await page.getByRole("button", { exact: true, name }).click();
      const dialog = page.getByRole("alertdialog");
      await dialog.getByRole("textbox").fill("customers");
      await dialog.getByRole("button", { exact: true, name }).click();
      await dialog.getByText("Asked for.").waitFor();
      await dialog.getByRole("button", { exact: true, name: "Close" }).last().click();
      // what is paused is said beside its table, until it goes on
      const told = page.getByRole("row", { name: /public\.customers/ }).getByText(/was paused/);
      await told.waitFor({ state: then ? "visible" : "detached" });
    }
  },
  lost: async () => {
    const page = await open("light");
    await one(page);
    await page.getByRole("button", { exact: true, name: "Start again" }).click();
    const dialog = page.getByRole("alertdialog");
    await dialog.getByRole("button", { exact: true, name: "Start again" }).click();
    await dialog.getByText("Asked for.").waitFor();
    await dialog.getByRole("button", { exact: true, name: "Close" }).last().click();
    await page.getByText(/No job could begin .* was invalidated/).first().waitFor();
    await page.goto(`${url}/plugin/bottledwater`);
    await page.getByText("1 of 1 needs you.").waitFor();
    await page.getByText(/No job could begin/).waitFor();
    await fits(page);
    await page.screenshot({ path: `${process.env.IMAGES}/lost.png` });
  },
  stop: async () => {
    const page = await open("light");
    await one(page);
    // with the keyboard alone
    await page.getByRole("button", { exact: true, name: "Stop" }).focus();
    await page.keyboard.press("Enter");
    const dialog = page.getByRole("alertdialog");
    await dialog.getByText("The slot is kept").waitFor();
    await dialog.getByRole("button", { exact: true, name: "Stop" }).focus();
    await page.keyboard.press("Enter");
    await dialog.getByText("Asked for.").waitFor();
    await dialog.getByRole("button", { exact: true, name: "Close" }).last().click();
    await page.getByText("stopped on request").waitFor();
    await page.getByRole("button", { name: "Start again" }).waitFor();
  },
  away: async () => {
    const page = await open("light");
    await page.goto(`${url}/plugin/bottledwater`);
    await page.getByText("Kafka is away").waitFor();
    await page.getByRole("link", { exact: true, name: "orders" }).waitFor();
  },
};

try {
  await steps[process.argv[2]]();
} catch (error) {
  failed.push(String(error));
  // what was seen instead
  for (const page of browser.contexts().flatMap((context) => context.pages()))
    await page.screenshot({ path: `${process.env.IMAGES}/failed-${process.argv[2]}.png` });
}
await browser.close();
for (const line of failed) console.log(line);
process.exit(failed.length > 0 ? 1 : 0);
