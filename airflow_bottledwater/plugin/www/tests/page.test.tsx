import { ChakraProvider, defaultSystem } from "@chakra-ui/react";
import { cleanup, configure, fireEvent, render, screen, waitFor } from "@testing-library/react";
import { MemoryRouter, Route, Routes } from "react-router-dom";
import { afterEach, expect, it, vi } from "vitest";

import type { Overview, Row } from "../src/api";
import BottledWater from "../src/main";

const row = (slot: string, more: Partial<Row> = {}): Row => ({
  kafka: "kafka_default", name: `7/shop/${slot}`, system: "7", database: "shop", slot, state: "streaming", wanted: true,
  retired: false, kind: "stream", reported: 0, rate: 1234, delay: 0.05, lag_bytes: 10, lag_seconds: 0, wal_kept: 2e9,
  wal_limit: 1e10, wal_safe: 8e9, memory: 1, dead_letters: 0, verified: null, snapshot: null, wrong: [],
  task: { dag_id: "orders", run_id: "r", task_id: "stream", map_index: -1 }, ...more,
});

// a busy machine takes longer than the usual second
configure({ asyncUtilTimeout: 5_000 });
vi.setConfig({ testTimeout: 30_000 });

const answers: Record<string, unknown> = {};
const asked: [string, RequestInit | undefined][] = [];

const shown = (path: string, props: { dagId?: string } = {}) => {
  vi.stubGlobal("fetch", async (url: string, init?: RequestInit) => {
    asked.push([url, init]);
    const [, found] = Object.entries(answers).find(([part]) => url.includes(part)) ?? [];
    return found === undefined ? new Response('{"detail": "Not Found"}', { status: 404 }) : new Response(JSON.stringify(found));
  });
  return render(
    <ChakraProvider value={defaultSystem}>
      <MemoryRouter initialEntries={[path]}>
        <Routes>
          <Route element={<BottledWater {...props} />} path="*" />
        </Routes>
      </MemoryRouter>
    </ChakraProvider>,
  );
};

const overview = (...pipelines: Row[]): Overview => ({
  pipelines, unbegun: [], wrong: pipelines.filter((each) => each.wrong.length > 0).length, away: {}, complete: true,
  kafkas: 1,
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  for (const key of Object.keys(answers)) delete answers[key];
  asked.length = 0;
});

it("lists the pipelines, with what is wrong", async () => {
  answers["api/pipelines"] = overview(row("bad", { wrong: ["The slot is lost."] }), row("good"));
  shown("/plugin/bottledwater");
  // over the whole width, below its pipeline
  expect((await screen.findByText("The slot is lost.")).closest("td")?.colSpan).toBe(8);
  expect(screen.getByText("1 of 2 needs you.")).toBeTruthy();
  expect(screen.getAllByText("2.0 GB of 10.0 GB")).toHaveLength(2);
  expect(screen.getAllByText("caught up")).toHaveLength(2);
});

it("says what to do first where there is nothing", async () => {
  answers["api/pipelines"] = { ...overview(), kafkas: 0 };
  shown("/plugin/bottledwater");
  expect(await screen.findByText("Admin › Connections")).toBeTruthy();
});

it("says that Kafka is away, above what was known last", async () => {
  answers["api/pipelines"] = { ...overview(row("good")), away: { kafka_default: "Kafka has not answered for 9 s." } };
  shown("/plugin/bottledwater");
  expect(await screen.findByText("Kafka has not answered for 9 s.")).toBeTruthy();
  expect(screen.getByText("good")).toBeTruthy();
});

it("does not say that all is well while a Kafka cannot be looked at", async () => {
  answers["api/pipelines"] = { ...overview(row("one"), row("two")), complete: false };
  shown("/plugin/bottledwater");
  expect(await screen.findByText("The 2 pipelines that could be looked at are as meant.")).toBeTruthy();
});

it("is a card on the dashboard", async () => {
  answers["api/pipelines"] = overview(row("bad", { wrong: ["x"] }), row("good"));
  shown("/");
  expect(await screen.findByText("1 of 2 needs you: bad")).toBeTruthy();
});

const unbegun = { slot: "stock", dag_id: "shop", run_id: "a+b", task_id: "preflight", map_index: -1, at: Date.now() / 1000 - 300, again: false };

it("shows a pipeline of which no job could begin, with the log of the task that says why", async () => {
  answers["api/pipelines"] = { ...overview(row("good")), unbegun: [unbegun], wrong: 1 };
  shown("/plugin/bottledwater");
  expect(await screen.findByText("stock: no job of this pipeline could begin.")).toBeTruthy();
  expect(screen.getByText("1 of 2 needs you.")).toBeTruthy();
  expect(screen.getByText("Its log").getAttribute("href")).toBe("/dags/shop/runs/a%2Bb/tasks/preflight");
  expect(screen.getByText("Its log").parentElement?.textContent).toBe(
    "The task preflight of the DAG shop failed 5 min ago. Its log says what is wrong and what to do. Then trigger the DAG again.",
  );
  cleanup();
  shown("/");
  expect(await screen.findByText("1 of 2 needs you: stock")).toBeTruthy();
  cleanup();
  answers["api/pipelines"] = { ...overview(), unbegun: [{ ...unbegun, again: true }], wrong: 1 };
  shown("/dags/shop", { dagId: "shop" });
  expect(await screen.findByText(/and Airflow tries it again/)).toBeTruthy();
  expect(screen.queryByText("No pipeline of this DAG has reported.")).toBeNull();
  expect(screen.queryByText("There is no pipeline yet.")).toBeNull();
});

it("asks for the pipelines of a DAG on its tab", async () => {
  answers["api/pipelines"] = overview();
  shown("/dags/orders", { dagId: "orders" });
  expect(await screen.findByText("No pipeline of this DAG has reported.")).toBeTruthy();
  expect(asked[0]?.[0]).toContain("dag_id=orders");
});

const detail = (more: Record<string, unknown> = {}) => ({
  ...row("good"), job: { id: "j", host: "h", pid: 1, epoch: 1, started: 0, repeats: 0 }, error: "", permanent: false,
  position: "", counters: {}, problems: [], pressure: {}, guard: [], publications: [], verification: null, live: [], tables: [], open_letters: {}, settings: {},
  connections: {}, actions: [], no_actions: "", unknown: "", away: "", ...more,
});

it("shows why records could not be published, and of which rows they are to who may", async () => {
  const letter = { table: "public.a", op: "u", position: "0/1", by: "stream", reason: "It is too large.", at: 0 };
  answers["api/pipelines"] = detail({ dead_letters: 2, tables: [{ table: "public.a", dead_letters: 1 }] });
  answers["api/history"] = { at: [], step: 10, complete: true, series: {} };
  answers["api/dead_letters"] = {
    letters: [{ ...letter, key: { id: "7", part: null } }, { ...letter, at: 1, key: null }], complete: false, keys: true,
  };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  expect(await screen.findByText("id = 7, part = NULL")).toBeTruthy();
  expect(screen.getAllByText("It is too large.")).toHaveLength(2);
  expect(screen.getByText("no key")).toBeTruthy();
  expect(screen.getByText("1 dead letter")).toBeTruthy();
  expect(screen.getByText(/Mend the cause, stop the pipeline, and\s+press Re-drive/)).toBeTruthy();
  expect(screen.getByText("These are the newest; the others are in the topic of dead letters.")).toBeTruthy();
  cleanup();
  answers["api/dead_letters"] = { letters: [{ ...letter, key: null }], complete: true, keys: false };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  expect(await screen.findByText(/^hidden/)).toBeTruthy();
});

it("shows how near the limits are, and what the guard has done", async () => {
  const step = { at: Date.now() / 1000 - 300, limit: "locks", step: "rested", reason: "3 sessions wait." };
  answers["api/pipelines"] = detail({ pressure: { wal: 0.254 }, guard: [step] });
  answers["api/history"] = { at: [], step: 10, complete: true, series: {} };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  expect(await screen.findByText("WAL kept: 25 % of the limit")).toBeTruthy();
  expect(screen.getByText("5 min ago: 3 sessions wait.")).toBeTruthy();
});

it("shows the job, its connections and its settings in words", async () => {
  answers["api/pipelines"] = detail({
    job: { id: "0123456789abcdef", host: "h", pid: 7, epoch: 2, started: Date.now() / 1000 - 300, repeats: 0 },
    connections: { postgres: "shop_db", kafka: "kafka_default", registry: "", spark: "" },
    settings: { tables: ["orders", "customers"], bounded: false, extra: { a: 1 }, prefix: "" },
  });
  answers["api/history"] = { at: [], step: 10, complete: true, series: {} };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  expect(await screen.findByText("stream, started 5 min ago on h (process 7, job 01234567, epoch 2)")).toBeTruthy();
  expect(screen.getByText("PostgreSQL shop_db · Kafka kafka_default")).toBeTruthy();
  expect(screen.getByText(/tables: orders, customers\s+bounded: off\s+extra: a = 1\s+prefix: –/)).toBeTruthy();
  expect(screen.getByText("WAL kept").closest("[title]")?.getAttribute("title")).toMatch(/replication slot/);
});

it("says of a snapshot that has finished that the pipeline has not", async () => {
  answers["api/pipelines"] = overview(row("a", { kind: "snapshot", state: "finished" }), row("b", { state: "finished" }));
  shown("/plugin/bottledwater");
  expect(await screen.findByText("snapshot finished")).toBeTruthy();
  expect(screen.getByText("finished")).toBeTruthy();
});

it("asks for no dead letters where there are none", async () => {
  answers["api/pipelines"] = detail({ tables: [{ table: "public.a", changed: Date.now() / 1000 - 300 }] });
  answers["api/history"] = { at: [], step: 10, complete: true, series: {} };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  expect(await screen.findByText("5 min ago")).toBeTruthy();
  expect(asked.some(([url]) => url.includes("dead_letters"))).toBe(false);
});

it("says what a button will do before it triggers the DAG", async () => {
  const action = {
    id: "stop", label: "Stop", dag_id: "orders_control", conf: { action: "stop", slot: "good" }, says: "The slot is kept.",
    impossible: "", danger: true, tables: false,
  };
  answers["api/pipelines"] = detail({
    actions: [action, { ...action, id: "start", label: "Start again", impossible: "It runs." }],
  });
  answers["api/history"] = { at: [], step: 10, complete: true, series: {} };
  answers["api/v2/dags/orders_control/dagRuns"] = { dag_run_id: "run 1" };
  shown("/plugin/bottledwater?kafka=kafka_default&name=7/shop/good");
  fireEvent.click(await screen.findByRole("button", { name: "Stop" }));
  expect(await screen.findByText("The slot is kept.")).toBeTruthy();
  expect((screen.getByText("Start again") as HTMLButtonElement).disabled).toBe(true);
  expect(asked.some(([, init]) => init?.method === "POST")).toBe(false);
  const buttons = screen.getAllByText("Stop");
  fireEvent.click(buttons[buttons.length - 1] as HTMLElement);
  await waitFor(() => expect(screen.getByText("See the run")).toBeTruthy());
  const [, sent] = asked.find(([, init]) => init?.method === "POST") ?? [];
  expect(JSON.parse(String(sent?.body))).toEqual({ logical_date: null, conf: { action: "stop", slot: "good" } });
});
