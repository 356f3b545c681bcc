// Numbers as people read them, as in the command's output (airflow_bottledwater/model/amounts.py).

export const NONE = "–";

export const count = (value: number | null | undefined): string =>
  value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");

/** A number a second, which may be less than one. */
export const perSecond = (value: number | null | undefined): string =>
  value !== null && value !== undefined && value > 0 && value < 10 ? String(+value.toFixed(1)) : count(value);

export const size = (value: number | null | undefined): string => {
  if (value === null || value === undefined) return NONE;
  let left = value;
  let unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (left < 1000) break;
    left /= 1000;
    unit = larger;
  }
  return `${left >= 100 || unit === "B" ? left.toFixed(0) : left.toFixed(1)} ${unit}`;
};

export const duration = (seconds: number | null | undefined): string => {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds > 0 && seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 100) return `${seconds >= 10 ? seconds.toFixed(0) : seconds.toFixed(1)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} days`;
};

export const ago = (at: number, now = Date.now() / 1000): string => `${duration(Math.max(0, now - at))} ago`;

export const STATES: Record<string, string> = {
  silent: "does not report",
  starting: "starting",
  snapshot: "snapshot",
  streaming: "streaming",
  waiting: "waiting",
  stopped: "stopped",
  finished: "finished",
  failed: "failed",
};

/** The palette of a state: red is what needs somebody. */
export const palette = (row: { wrong: string[]; wanted: boolean; state: string }): string => {
  if (row.wrong.length > 0) return "red";
  if (!row.wanted) return "gray";
  return row.state === "waiting" || row.state === "starting" ? "orange" : "green";
};
