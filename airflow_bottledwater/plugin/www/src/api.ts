// What the page asks: the plugin's own app for what is shown, Airflow's API for what is done.

export type Task = { dag_id: string; run_id: string; task_id: string; map_index: number };

export type Row = {
  kafka: string;
  name: string;
  system: string;
  database: string;
  slot: string;
  state: string;
  wanted: boolean;
  retired: boolean;
  kind: string;
  reported: number;
  rate: number | null;
  delay: number | null;
  lag_bytes: number | null;
  lag_seconds: number | null;
  wal_kept: number | null;
  wal_limit: number | null;
  wal_safe: number | null;
  memory: number | null;
  dead_letters: number;
  verified: { at: number; equal: boolean } | null;
  snapshot: Record<string, number> | null;
  wrong: string[];
  task: Task | null;
};

/** A pipeline of which no job has ever reported, and the task that failed before it. */
export type Unbegun = Task & { slot: string; at: number | null; again: boolean };

export type Overview = { pipelines: Row[]; unbegun: Unbegun[]; wrong: number; away: Record<string, string>; complete: boolean; kafkas: number };

export type Problem = { kind: string; subject: string; reason: string; remedy: string; since: number };

export type TableRow = {
  table: string;
  topic?: string;
  topic_url?: string;
  ranges?: string;
  snapshot_rows?: number;
  complete?: boolean;
  rows?: Record<string, number>;
  rate?: number;
  // when its last change was committed, in seconds since 1970
  changed?: number;
  dead_letters?: number;
  problems?: { kind: string; reason: string; remedy: string }[];
};

export type Live = {
  id: string;
  state: string;
  open: boolean;
  paused: boolean;
  what: string;
  tables: string[];
  where: string;
  rows: number;
  bytes: number;
  total_bytes: number;
  rows_per_second: number;
  seconds_left: number | null;
  error: string;
};

export type Action = {
  id: string;
  label: string;
  dag_id: string;
  conf: Record<string, unknown>;
  says: string;
  // why it cannot be done now; empty if it can
  impossible: string;
  danger: boolean;
  // whether it asks for tables
  tables: boolean;
};

export type Detail = Row & {
  job: { id: string; host: string; pid: number; epoch: number; started: number; repeats: number };
  error: string;
  permanent: boolean;
  position: string;
  counters: Record<string, number>;
  problems: Problem[];
  // how much of each limit of the guard is used: 1 is all of it
  pressure: Record<string, number>;
  guard: { at: number; limit: string; step: string; reason: string }[];
  verification: { at: number; rows: number; different: string[]; unverified: string[] } | null;
  live: Live[];
  tables: TableRow[];
  open_letters: Record<string, Record<string, number>>;
  publications: string[];
  settings: Record<string, unknown>;
  connections: Record<string, string>;
  actions: Action[];
  no_actions: string;
  unknown: string;
  away: string;
};

export type History = {
  at: number[];
  step: number;
  complete: boolean;
  series: Record<string, (number | null)[]>;
};

export type DeadLetter = {
  table: string;
  op: string;
  position: string;
  by: string;
  reason: string;
  key: Record<string, string | null> | null;
  at: number;
};

export type DeadLetters = {
  letters: DeadLetter[];
  // whether there are no others
  complete: boolean;
  // whether the user may see of which rows they are
  keys: boolean;
};

/** Why an answer did not come, for people. */
export class Failure extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const SAID: Record<number, string> = {
  401: "Your session has ended. Log in again.",
  403: "You have no right to do this.",
};

/** An address below that of Airflow's front end, wherever that is mounted. */
export const address = (path: string): string => new URL(path, document.baseURI).href;

/** Milliseconds after which an answer is not waited for any more: the server gives up after fewer. */
const PATIENCE = 30_000;

const ask = async <T>(path: string, init?: RequestInit): Promise<T> => {
  let answer: Response;
  try {
    answer = await fetch(address(path), { credentials: "same-origin", signal: AbortSignal.timeout(PATIENCE), ...init });
  } catch {
    throw new Failure(0, "Airflow's API server does not answer.");
  }
  const content = await answer.json().catch(() => undefined);
  if (answer.ok && content === undefined) {
    // a proxy in front of Airflow shows its own page, to log in, say
    throw new Failure(0, "The answer is not Airflow's. Reload the page, and log in again if you are asked to.");
  }
  if (!answer.ok) {
    const detail = typeof content?.detail === "string" ? content.detail : `The answer was ${answer.status}.`;
    throw new Failure(answer.status, answer.status === 401 ? SAID[401] : detail || SAID[answer.status]);
  }
  return content as T;
};

/** The page of Airflow that has a task's log. */
export const logOf = (task: Task): string =>
  `/dags/${encodeURIComponent(task.dag_id)}/runs/${encodeURIComponent(task.run_id)}/tasks/${encodeURIComponent(task.task_id)}${task.map_index >= 0 ? `/mapped/${task.map_index}` : ""}`;

const of = (row: { kafka: string; name: string }): string =>
  `${encodeURIComponent(row.kafka)}/${row.name.split("/").map(encodeURIComponent).join("/")}`;

export const overview = (dagId = ""): Promise<Overview> =>
  ask(`bottledwater/api/pipelines${dagId ? `?dag_id=${encodeURIComponent(dagId)}` : ""}`);

export const detail = (row: { kafka: string; name: string }): Promise<Detail> =>
  ask(`bottledwater/api/pipelines/${of(row)}`);

export const history = (row: { kafka: string; name: string }, period: number): Promise<History> =>
  ask(`bottledwater/api/history/${of(row)}?period=${period}`);

export const deadLetters = (row: { kafka: string; name: string }): Promise<DeadLetters> =>
  ask(`bottledwater/api/dead_letters/${of(row)}`);

/** Do something: Airflow triggers a DAG, if the user may, and writes it into its audit log. */
export const act = (action: Action, more: Record<string, unknown>): Promise<{ dag_run_id: string }> =>
  ask(`api/v2/dags/${encodeURIComponent(action.dag_id)}/dagRuns`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ logical_date: null, conf: { ...action.conf, ...more } }),
  });
