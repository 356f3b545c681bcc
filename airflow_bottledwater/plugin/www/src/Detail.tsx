import { Badge, Box, Button, Code, Flex, Heading, HStack, Link, Progress, SimpleGrid, Skeleton, Stat, Table, Text } from "@chakra-ui/react";
import { useState, type ReactNode } from "react";
import { Link as RouterLink } from "react-router-dom";

import { Actions } from "./Actions";
import { deadLetters, detail, history, logOf, type DeadLetter, type Detail as Found, type Live, type TableRow } from "./api";
import { ago, count, duration, NONE, perSecond, size } from "./format";
import { behind, kept, MEANINGS, State } from "./List";
import { Note } from "./Note";
import { Plot } from "./Plot";
import { useAnswer } from "./useAnswer";

const PERIODS: [number, string][] = [
  [900, "15 min"],
  [3600, "1 hour"],
  [21600, "6 hours"],
  [86400, "1 day"],
  [604800, "7 days"],
];

const Section = ({ children, title }: { readonly children: ReactNode; readonly title: string }) => (
  <Box as="section" mt={6}>
    <Heading mb={2} size="md">
      {title}
    </Heading>
    {children}
  </Box>
);

const Number = ({ label, value, bad }: { readonly label: string; readonly value: string; readonly bad?: boolean }) => (
  <Stat.Root size="sm" title={MEANINGS[label]}>
    <Stat.Label>{label}</Stat.Label>
    <Stat.ValueText color={bad ? "fg.error" : undefined} fontSize="lg" whiteSpace="nowrap">{value}</Stat.ValueText>
  </Stat.Root>
);

const Plots = ({ of }: { readonly of: Found }) => {
  const [period, setPeriod] = useState(900);
  const { data, failure } = useAnswer(
    `${of.kafka} ${of.name} ${period}`,
    () => history(of, period),
    (found) => (found?.complete === false ? 300 : Math.max(5, Math.min(60, found?.step ?? 5)) * 1000),
  );
  return (
    <Section title="History">
      <HStack aria-label="Period" gap={1} mb={2} role="group">
        {PERIODS.map(([seconds, label]) => (
          <Button aria-pressed={seconds === period} key={seconds} onClick={() => setPeriod(seconds)} size="xs" variant={seconds === period ? "solid" : "outline"}>
            {label}
          </Button>
        ))}
        {data?.complete === false && <Text color="fg.muted" fontSize="sm">Older samples are being read …</Text>}
      </HStack>
      {failure !== undefined && <Note status="error" title={failure.message} />}
      {data === undefined ? (
        failure === undefined && <Skeleton h="190px" />
      ) : (
        <SimpleGrid columns={{ base: 1, md: 2 }} gap={3}>
          <Plot
            history={data}
            lines={[
              { name: "inserts", label: "Inserts", color: "#2f9e44" },
              { name: "updates", label: "Updates", color: "#1c7ed6" },
              { name: "deletes", label: "Deletes", color: "#e8590c" },
            ]}
            show={perSecond}
            title="Row changes in a second"
          />
          <Plot history={data} lines={[{ name: "lag_bytes", label: "Behind", color: "#845ef7" }]} show={size} title="WAL that is not published" />
          <Plot
            history={data}
            lines={[
              { name: "delay_p50", label: "50 %", color: "#1c7ed6" },
              { name: "delay_p95", label: "95 %", color: "#e8590c" },
              { name: "lag_seconds", label: "Oldest waiting", color: "#845ef7", dashed: true },
            ]}
            show={duration}
            title="Delay: PostgreSQL commit to Kafka commit"
          />
          <Plot
            history={data}
            lines={[
              { name: "wal_kept", label: "Kept", color: "#0c8599" },
              { name: "wal_limit", label: "Limit", color: "#e03131", dashed: true },
            ]}
            show={size}
            title="WAL that PostgreSQL keeps for the slot"
          />
        </SimpleGrid>
      )}
    </Section>
  );
};

const Snapshot = ({ of }: { readonly of: Found }) => {
  const { ranges, ranges_done: done, rows, seconds_left: left } = of.snapshot ?? {};
  if (!ranges) return null;
  return (
    <Section title="Snapshot">
      <Bar done={done ?? 0} total={ranges} label={`${count(done)} of ${count(ranges)} ranges · ${count(rows)} rows${left ? ` · ${duration(left)} left` : ""}`} />
    </Section>
  );
};

const Bar = ({ done, label, total }: { readonly done: number; readonly label: string; readonly total: number }) => (
  <Progress.Root maxW="700px" value={total ? Math.min(100, (100 * done) / total) : null}>
    <Progress.Label fontWeight="normal">{label}</Progress.Label>
    <Progress.Track>
      <Progress.Range />
    </Progress.Track>
  </Progress.Root>
);

const LiveSnapshot = ({ live }: { readonly live: Live }) => (
  <Box mb={3}>
    <Bar
      done={live.state === "finished" ? 1 : live.bytes}
      label={[
        `${live.tables.join(", ")}${live.where ? ` where ${live.where}` : ""}: ${live.state}`,
        `${count(live.rows)} rows`,
        live.rows_per_second ? `${count(live.rows_per_second)} rows/s` : "",
        live.seconds_left === null ? "" : `${duration(live.seconds_left)} left`,
        live.what,
      ]
        .filter(Boolean)
        .join(" · ")}
      total={live.state === "finished" ? 1 : live.total_bytes}
    />
    {live.error && <Text color="fg.error" fontSize="sm">{live.error}</Text>}
  </Box>
);

const snapshotOf = (table: TableRow): string =>
  table.complete ? `complete${table.snapshot_rows ? `, ${count(table.snapshot_rows)} rows` : ""}` : table.ranges === undefined ? NONE : `${table.ranges} ranges, ${count(table.snapshot_rows)} rows`;

const Tables = ({ of }: { readonly of: Found }) => (
  <Section title="Tables">
    {of.unknown && <Text color="fg.warning" fontSize="sm" mb={1}>{of.unknown}</Text>}
    <Box overflowX="auto">
      <Table.Root aria-label="Tables" size="sm">
        <Table.Header>
          <Table.Row>
            {["Table", "Topic", "Snapshot", "Inserts", "Updates", "Deletes", "Rows/s", "Last change"].map((column, index) => (
              <Table.ColumnHeader key={column} textAlign={index > 2 ? "end" : "start"}>{column}</Table.ColumnHeader>
            ))}
          </Table.Row>
        </Table.Header>
        <Table.Body>
          {of.tables.map((table) => (
            <Table.Row key={table.table} verticalAlign="top">
              <Table.Cell maxW="420px">
                {table.table}
                {table.dead_letters ? <Badge colorPalette="red" ml={2}>{count(table.dead_letters)} dead {table.dead_letters === 1 ? "letter" : "letters"}</Badge> : null}
                {table.problems?.map((problem) => (
                  <Text color="fg.error" fontSize="xs" key={problem.kind}>{problem.reason} {problem.remedy}</Text>
                ))}
              </Table.Cell>
              <Table.Cell>
                {table.topic_url ? <Link href={table.topic_url} rel="noreferrer" target="_blank">{table.topic}</Link> : (table.topic ?? "not followed")}
              </Table.Cell>
              <Table.Cell>{snapshotOf(table)}</Table.Cell>
              {["insert", "update", "delete"].map((operation) => (
                <Table.Cell key={operation} textAlign="end">{count(table.rows?.[operation] ?? 0)}</Table.Cell>
              ))}
              <Table.Cell textAlign="end">{count(table.rate ?? 0)}</Table.Cell>
              <Table.Cell textAlign="end" whiteSpace="nowrap">{table.changed === undefined ? NONE : ago(table.changed)}</Table.Cell>
            </Table.Row>
          ))}
        </Table.Body>
      </Table.Root>
    </Box>
    <Text color="fg.muted" fontSize="xs" mt={1}>Changes are counted from the start of the present job.</Text>
  </Section>
);

const OPERATIONS: Record<string, string> = { c: "insert", u: "update", d: "delete", r: "row of a snapshot", m: "logical message" };

const rowOf = (letter: DeadLetter, keys: boolean): string => {
  if (!keys) return "hidden: you may not trigger the DAG of this pipeline";
  return letter.key === null ? "no key" : Object.entries(letter.key).map(([name, value]) => `${name} = ${value ?? "NULL"}`).join(", ");
};

const DeadLetters = ({ of }: { readonly of: Found }) => {
  const { data, failure } = useAnswer(`letters of ${of.kafka} ${of.name}`, () => deadLetters(of), () => 15_000);
  return (
    <Section title="Dead letters">
      <Text color="fg.muted" fontSize="sm" mb={2}>
        Records that could not be published and were put aside, so that the others go on. Mend the cause, stop the pipeline, and
        press Re-drive; or give them up with Dismiss dead letters.
      </Text>
      {failure !== undefined && <Note status="error" title={failure.message} />}
      {data === undefined ? (
        failure === undefined && <Skeleton h="60px" />
      ) : (
        <Box overflowX="auto">
          <Table.Root aria-label="Dead letters" size="sm">
            <Table.Header>
              <Table.Row>
                {["Table", "Row", "Why it could not be published", "Change", "Position", "Written"].map((column) => (
                  <Table.ColumnHeader key={column}>{column}</Table.ColumnHeader>
                ))}
              </Table.Row>
            </Table.Header>
            <Table.Body>
              {data.letters.map((letter) => (
                <Table.Row key={`${letter.table} ${letter.position} ${letter.at} ${JSON.stringify(letter.key)}`} verticalAlign="top">
                  <Table.Cell>{letter.table}</Table.Cell>
                  <Table.Cell maxW="260px" minW="110px" overflowWrap="anywhere">{rowOf(letter, data.keys)}</Table.Cell>
                  <Table.Cell maxW="420px" overflowWrap="anywhere">{letter.reason}</Table.Cell>
                  <Table.Cell>{OPERATIONS[letter.op] ?? letter.op}</Table.Cell>
                  <Table.Cell><Code size="sm">{letter.position || NONE}</Code></Table.Cell>
                  <Table.Cell whiteSpace="nowrap">{ago(letter.at)}</Table.Cell>
                </Table.Row>
              ))}
            </Table.Body>
          </Table.Root>
          {!data.complete && <Text color="fg.muted" fontSize="xs" mt={1}>These are the newest; the others are in the topic of dead letters.</Text>}
        </Box>
      )}
    </Section>
  );
};

const LIMITS: Record<string, string> = {
  wal: "WAL kept", xmin: "age of xmin", locks: "waiting for locks", replica: "lag of standbys",
};

const Guard = ({ of }: { readonly of: Found }) => (
  <Section title="Guard">
    <Text fontSize="sm">
      {Object.entries(of.pressure).map(([limit, used]) => `${LIMITS[limit] ?? limit}: ${(100 * used).toFixed(0)} % of the limit`).join(" · ")}
    </Text>
    {of.guard.slice(-5).reverse().map((step) => (
      <Text color="fg.warning" fontSize="sm" key={`${step.at} ${step.limit}`}>{ago(step.at)}: {step.reason}</Text>
    ))}
  </Section>
);

const CONNECTIONS: Record<string, string> = { postgres: "PostgreSQL", kafka: "Kafka", registry: "Schema Registry", spark: "Spark" };

/** A setting as people write it, not as JSON. */
export const plain = (value: unknown): string => {
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (typeof value === "boolean") return value ? "on" : "off";
  if (value !== null && typeof value === "object") return Object.entries(value).map(([name, each]) => `${name} = ${plain(each)}`).join(", ");
  return value === null || value === "" ? NONE : String(value);
};

const Facts = ({ of }: { readonly of: Found }) => {
  const facts: [string, ReactNode][] = [
    ["Job", `${of.kind}, started ${ago(of.job.started)} on ${of.job.host} (process ${of.job.pid}, job ${of.job.id.slice(0, 8)}, epoch ${of.job.epoch})`],
    ["Reported", ago(of.reported)],
    ["Position in WAL", <Code key="position">{of.position || NONE}</Code>],
    ["Published", Object.entries(of.counters).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(" · ")],
    ["Verified", of.verification === null ? "never" : `${ago(of.verification.at)}, ${count(of.verification.rows)} rows${of.verification.different.length ? `; different: ${of.verification.different.join(", ")}` : ""}${of.verification.unverified.length ? `; unverified: ${of.verification.unverified.join(", ")}` : ""}`],
    ["Publications", of.publications.join(", ") || NONE],
    ["Connections", Object.entries(of.connections).filter(([, id]) => id).map(([name, id]) => `${CONNECTIONS[name] ?? name} ${id}`).join(" · ") || NONE],
    ["Settings", <Code key="settings" whiteSpace="pre-wrap">{Object.entries(of.settings).map(([name, value]) => `${name}: ${plain(value)}`).join("\n") || "all defaults"}</Code>],
  ];
  if (of.task !== null) {
    facts.unshift(["Task", <Link asChild colorPalette="blue" key="task" textDecoration="underline"><RouterLink to={logOf(of.task)}>{of.task.task_id} of {of.task.dag_id}, with its log</RouterLink></Link>]);
  }
  return (
    <Section title="Job and settings">
      <Table.Root size="sm">
        <Table.Body>
          {facts.map(([name, value]) => (
            <Table.Row key={name} verticalAlign="top">
              <Table.Cell color="fg.muted" w="130px">{name}</Table.Cell>
              <Table.Cell>{value}</Table.Cell>
            </Table.Row>
          ))}
        </Table.Body>
      </Table.Root>
    </Section>
  );
};

export const Detail = ({ of }: { readonly of: { kafka: string; name: string } }) => {
  const { data, failure } = useAnswer(`${of.kafka} ${of.name}`, () => detail(of));
  if (data === undefined) return failure === undefined ? <Skeleton h="160px" /> : <Note status="error" title={failure.message} />;
  const told = new Set(data.wrong.join(" ").split("\n"));
  const problems = data.problems.filter((problem) => !data.wrong.some((line) => line.includes(problem.reason)));
  return (
    <Box>
      <Flex align="center" gap={3} justify="space-between" wrap="wrap">
        <HStack>
          <Heading size="lg">{data.slot}</Heading>
          <State row={data} />
          <Text color="fg.muted" fontSize="sm">database {data.database}</Text>
        </HStack>
        <Actions of={data} />
      </Flex>
      <Box mt={3}>
        {failure !== undefined && <Note status="error" title={failure.message} />}
        {data.away && <Note status="error" title="Kafka is away: what is shown is what was known last."><Text>{data.away}</Text></Note>}
        {data.wrong.map((line) => <Note key={line} status="error" title={line} />)}
        {data.error && !told.has(data.error) && !data.wrong.some((line) => line.includes(data.error)) && <Note status="warning" title="Last error"><Text>{data.error}</Text></Note>}
        {problems.map((problem) => (
          <Note key={`${problem.kind} ${problem.subject}`} status="warning" title={`${problem.subject}: ${problem.reason}`}>
            <Text>{problem.remedy} ({problem.kind}, {ago(problem.since)})</Text>
          </Note>
        ))}
      </Box>
      <SimpleGrid columns={{ base: 3, lg: 6 }} gap={4} mt={2}>
        <Number label="Rows/s" value={count(data.rate)} />
        <Number label="Behind" value={behind(data)} />
        <Number label="Delay (95 %)" value={data.delay === null ? NONE : `≤ ${duration(data.delay)}`} />
        <Number bad={data.wal_safe !== null && data.wal_limit !== null && data.wal_safe < data.wal_limit / 4} label="WAL kept" value={kept(data)} />
        <Number bad={data.dead_letters > 0} label="Dead letters" value={count(data.dead_letters)} />
        <Number label="Memory" value={size(data.memory)} />
      </SimpleGrid>
      <Snapshot of={data} />
      {data.live.length > 0 && <Section title="Live snapshots">{data.live.map((live) => <LiveSnapshot key={live.id} live={live} />)}</Section>}
      <Plots of={data} />
      <Tables of={data} />
      {data.dead_letters > 0 && <DeadLetters of={data} />}
      {(data.guard.length > 0 || Object.keys(data.pressure).length > 0) && <Guard of={data} />}
      <Facts of={data} />
    </Box>
  );
};
