import { Box, Text } from "@chakra-ui/react";
import { useEffect, useRef, useState } from "react";
import uPlot from "uplot";
import style from "uplot/dist/uPlot.min.css?inline";

import type { History } from "./api";

export type Line = { name: string; label: string; color: string; dashed?: boolean };

const HEIGHT = 150;

/** Changes when Airflow changes between light and dark: a canvas has no CSS of its own. */
const useTheme = (): string => {
  const read = () => `${document.documentElement.className} ${document.documentElement.dataset.theme ?? ""}`;
  const [theme, setTheme] = useState(read);
  useEffect(() => {
    const observer = new MutationObserver(() => setTheme(read()));
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["class", "data-theme"] });
    return () => observer.disconnect();
  }, []);
  return theme;
};

/** A time as the browser's place has it: with the day where a plot has several. */
const clock = (time: number, { at }: History): string => {
  const days = (at[at.length - 1] ?? 0) - (at[0] ?? 0) > 86400;
  const day = days ? ({ day: "2-digit", month: "2-digit" } as const) : {};
  return new Date(time * 1000).toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
};

const addStyle = () => {
  if (document.getElementById("bottledwater-uplot") === null) {
    const element = document.createElement("style");
    element.id = "bottledwater-uplot";
    // the font of the page, and a legend of one line also where plots have half the width
    element.textContent = `${style} .uplot, .u-legend { font-family: inherit; } .u-legend { font-size: 12px; line-height: 1.3; white-space: nowrap; } .u-legend th { font-weight: normal; } .u-legend th, .u-legend td { padding: 2px; } .u-inline .u-series { margin-right: 6px; }`;
    document.head.append(element);
  }
};

export const Plot = ({
  history,
  lines,
  title,
  show,
}: {
  readonly history: History;
  readonly lines: Line[];
  readonly title: string;
  readonly show: (value: number) => string;
}) => {
  const place = useRef<HTMLDivElement>(null);
  const theme = useTheme();
  const shown = lines.filter((line) => history.series[line.name]?.some((value) => value !== null));
  const names = shown.map((line) => line.name).join();

  useEffect(() => {
    const element = place.current;
    if (element === null || shown.length === 0) return undefined;
    addStyle();
    const ink = getComputedStyle(element).color;
    const axis = { stroke: ink, font: `12px ${getComputedStyle(element).fontFamily}`, grid: { stroke: `color-mix(in srgb, ${ink} 15%, transparent)`, width: 1 }, ticks: { show: false } };
    const plot = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        cursor: { sync: { key: "bottledwater" }, y: false },
        legend: { live: true },
        scales: { y: { range: (_, __, max) => [0, max > 0 ? max * 1.05 : 1] } },
        axes: [{ ...axis, size: 28, values: (_, times) => times.map((time) => clock(time, history)) }, { ...axis, size: 68, values: (_, values) => values.map(show) }],
        series: [
          { label: "Time", value: (_: uPlot, time: number | null) => (time === null ? "–" : clock(time, history)) },
          ...shown.map((line) => ({
            label: line.label,
            stroke: line.color,
            width: 1.5,
            dash: line.dashed ? [6, 4] : undefined,
            points: { show: false },
            value: (_: uPlot, value: number | null) => (value === null ? "–" : show(value)),
          })),
        ],
      },
      [history.at, ...shown.map((line) => history.series[line.name])] as uPlot.AlignedData,
      element,
    );
    const sized = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    sized.observe(element);
    return () => {
      sized.disconnect();
      plot.destroy();
    };
    // a new answer makes a new plot: it has some hundred points
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [history, names, theme]);

  return (
    <Box borderWidth="1px" borderRadius="md" minW="0" p={3} role="figure" aria-label={title}>
      <Text fontSize="sm" fontWeight="semibold" mb={1}>
        {title}
      </Text>
      {shown.length === 0 ? (
        <Text color="fg.muted" fontSize="sm" h={`${HEIGHT}px`}>
          Nothing was measured in this time.
        </Text>
      ) : (
        <Box color="fg.muted" fontSize="xs" minH={`${HEIGHT}px`} ref={place} />
      )}
    </Box>
  );
};
