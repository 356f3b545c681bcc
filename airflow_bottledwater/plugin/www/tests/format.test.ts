import { describe, expect, it } from "vitest";

import { ago, count, duration, palette, perSecond, size } from "../src/format";

describe("numbers are as the command prints them", () => {
  it("sizes", () => {
    expect([0, 999, 1000, 1_500_000, 2e9, 123e9].map(size)).toEqual(["0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 GB", "123 GB"]);
  });
  it("numbers a second, with what is less than one", () => {
    expect([0, 0.5, 1, 2.25, 12.5, 1234].map(perSecond)).toEqual(["0", "0.5", "1", "2.3", "13", "1,234"]);
    expect(perSecond(null)).toBe("–");
  });
  it("durations", () => {
    expect([0, 0.25, 2.5, 75, 600, 7200, 864000].map(duration)).toEqual(["0 s", "250 ms", "2.5 s", "75 s", "10 min", "2.0 h", "10 days"]);
    expect(ago(100, 190)).toBe("90 s ago");
  });
  it("what is not known is a dash", () => {
    expect([count(null), size(undefined), duration(null)]).toEqual(["–", "–", "–"]);
  });
});

describe("a state's colour", () => {
  const row = { wrong: [] as string[], wanted: true, state: "streaming" };
  it("is red only where somebody is needed", () => {
    expect(palette(row)).toBe("green");
    expect(palette({ ...row, wrong: ["The slot is lost."], wanted: false })).toBe("red");
    expect(palette({ ...row, wanted: false, state: "stopped" })).toBe("gray");
    expect(palette({ ...row, state: "waiting" })).toBe("orange");
  });
});
