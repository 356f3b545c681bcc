import { Badge, Box, Heading, Link, Table, Text } from "@chakra-ui/react";
import { Fragment } from "react";
import { Link as RouterLink } from "react-router-dom";

import { ago, count, duration, NONE, palette, size, STATES } from "./format";
import { logOf, type Overview, type Row, type Unbegun } from "./api";
import { Note } from "./Note";

export const to = (row: { kafka: string; name: string }): string =>
  `/plugin/bottledwater?${new URLSearchParams({ kafka: row.kafka, name: row.name }).toString()}`;

export const State = ({ row }: { readonly row: Row }) => (
  <Badge colorPalette={palette(row)} variant="subtle">
    {row.wanted ? row.state === "finished" && row.kind === "snapshot" ? "snapshot finished" : (STATES[row.state] ?? row.state) : row.retired ? "retired" : "stopped on request"}
  </Badge>
);

export const behind = (row: Row): string =>
  row.lag_bytes === null ? NONE : row.lag_seconds !== null && row.lag_seconds < 1 ? "caught up" : `${size(row.lag_bytes)}${row.lag_seconds ? `, ${duration(row.lag_seconds)}` : ""}`;

export const kept = (row: Row): string => `${size(row.wal_kept)}${row.wal_limit ? ` of ${size(row.wal_limit)}` : ""}`;

const verified = (row: Row): string =>
  row.verified === null ? "never" : `${row.verified.equal ? "" : "not equal, "}${ago(row.verified.at)}`;

const progress = (row: Row): string => {
  const { ranges, ranges_done: done, seconds_left: left } = row.snapshot ?? {};
  if (!ranges) return "";
  return ` ${Math.floor((100 * (done ?? 0)) / ranges)} %${left ? `, ${duration(left)} left` : ""}`;
};

/** What to do where there is nothing to see yet. */
export const Empty = ({ kafkas, dagId }: { readonly kafkas: number; readonly dagId?: string }) => (
  <Note status="info" title={dagId ? "No pipeline of this DAG has reported." : "There is no pipeline yet."}>
    {dagId !== undefined ? (
      <Text>A pipeline appears here once a task of this DAG has submitted its job.</Text>
    ) : kafkas === 0 ? (
      <Text>
        First create a connection of type Apache Kafka under{" "}
        <Link asChild colorPalette="blue">
          <RouterLink to="/connections">Admin › Connections</RouterLink>
        </Link>{" "}
        (kafka_default, with bootstrap.servers in its extra), and one of type Postgres to the source. Pipelines are found by the
        Kafka connections.
      </Text>
    ) : (
      <Text>
        Trigger the DAG{" "}
        <Link asChild colorPalette="blue">
          <RouterLink to="/dags/bottledwater">bottledwater</RouterLink>
        </Link>{" "}
        (one of the ready DAGs, which are copied to your DAGs) with its form, or describe a pipeline in a DAG of your own. It appears here a few seconds after its job has begun, if you
        may read its DAG.
      </Text>
    )}
  </Note>
);

// what the numbers are, for whom has the pointer on their names
export const MEANINGS: Record<string, string> = {
  "Rows/s": "Row changes that are published in a second.",
  Behind: "What is committed in PostgreSQL and not yet published: the size of its WAL, and how old the oldest of it is.",
  "Delay (95 %)": "95 % of the changes take at most so long from the commit in PostgreSQL to the commit in Kafka.",
  "WAL kept": "What PostgreSQL keeps on its disk for the pipeline's replication slot, and the limit from which on it gives the slot up.",
  "Dead letters": "Records that could not be published and were put aside: re-drive them when their cause is mended, or dismiss them.",
  Verified: "When topics and tables were last compared, row by row.",
  Memory: "What the job's processes have.",
};

const COLUMNS = ["Pipeline", "State", "Rows/s", "Behind", "Delay (95 %)", "WAL kept", "Dead letters", "Verified"];

/** A pipeline that Kafka knows nothing of, since a task before its first job has failed. */
const CouldNotBegin = ({ of }: { readonly of: Unbegun }) => (
  <Note status="error" title={`${of.slot}: no job of this pipeline could begin.`}>
    <Text>
      The task {of.task_id} of the DAG {of.dag_id} failed{of.at === null ? "" : ` ${ago(of.at)}`}
      {of.again ? ", and Airflow tries it again" : ""}.{" "}
      <Link asChild textDecoration="underline">
        <RouterLink to={logOf(of)}>Its log</RouterLink>
      </Link>{" "}
      says what is wrong and what to do. Then {of.again ? "it goes on by itself" : "trigger the DAG again"}.
    </Text>
  </Note>
);

/** How many pipelines there are, with those that could not begin. */
export const total = (found: Overview): number => found.pipelines.length + found.unbegun.length;

export const List = ({ found }: { readonly found: Overview }) => (
  <Box>
    {Object.entries(found.away).map(([conn, why]) => (
      <Note key={conn} status="error" title="Kafka is away: what is shown is what was known last.">
        <Text>{why}</Text>
      </Note>
    ))}
    {found.unbegun.map((each) => <CouldNotBegin key={`${each.dag_id} ${each.slot}`} of={each} />)}
    {found.pipelines.length === 0 ? (
      Object.keys(found.away).length === 0 && found.unbegun.length === 0 && <Empty kafkas={found.kafkas} />
    ) : (
      <Box overflowX="auto">
        <Table.Root size="sm" aria-label="Pipelines">
          <Table.Header>
            <Table.Row>
              {COLUMNS.map((column, index) => (
                <Table.ColumnHeader key={column} textAlign={index > 1 ? "end" : "start"} title={MEANINGS[column]} whiteSpace="nowrap">
                  {column}
                </Table.ColumnHeader>
              ))}
            </Table.Row>
          </Table.Header>
          <Table.Body>
            {found.pipelines.map((row) => (
              <Fragment key={`${row.kafka} ${row.name}`}>
                <Table.Row css={row.wrong.length > 0 ? { "& td": { borderBottomWidth: 0 } } : undefined} verticalAlign="top">
                  <Table.Cell maxW="380px">
                    <Link asChild fontWeight="semibold">
                      <RouterLink to={to(row)}>{row.slot}</RouterLink>
                    </Link>
                    <Text color="fg.muted" fontSize="xs">
                      database {row.database}
                      {row.task === null ? "" : ` · DAG ${row.task.dag_id}`}
                    </Text>
                  </Table.Cell>
                  <Table.Cell whiteSpace="nowrap">
                    <State row={row} />
                    <Text as="span" fontSize="xs">{progress(row)}</Text>
                  </Table.Cell>
                  <Table.Cell textAlign="end">{count(row.rate)}</Table.Cell>
                  <Table.Cell textAlign="end" whiteSpace="nowrap">{behind(row)}</Table.Cell>
                  <Table.Cell textAlign="end" whiteSpace="nowrap">{row.delay === null ? NONE : `≤ ${duration(row.delay)}`}</Table.Cell>
                  <Table.Cell textAlign="end" whiteSpace="nowrap">{kept(row)}</Table.Cell>
                  <Table.Cell color={row.dead_letters > 0 ? "fg.error" : undefined} textAlign="end">
                    {count(row.dead_letters)}
                  </Table.Cell>
                  <Table.Cell color={row.verified?.equal === false ? "fg.error" : undefined} textAlign="end" whiteSpace="nowrap">
                    {verified(row)}
                  </Table.Cell>
                </Table.Row>
                {row.wrong.length > 0 && (
                  <Table.Row>
                    <Table.Cell colSpan={COLUMNS.length} pt={0}>
                      {row.wrong.slice(0, 3).map((line) => (
                        <Text color="fg.error" fontSize="xs" key={line} lineClamp={4}>
                          {line}
                        </Text>
                      ))}
                    </Table.Cell>
                  </Table.Row>
                )}
              </Fragment>
            ))}
          </Table.Body>
        </Table.Root>
      </Box>
    )}
  </Box>
);

export const Title = ({ found }: { readonly found?: Overview }) => (
  <Box mb={4}>
    <Heading size="lg">Bottled Water</Heading>
    {found !== undefined && total(found) > 0 && (
      <Text color={found.wrong > 0 ? "fg.error" : "fg.muted"} fontSize="sm">
        {found.wrong > 0
          ? `${found.wrong} of ${total(found)} ${found.wrong === 1 ? "needs" : "need"} you.`
          : `${found.pipelines.length === 1 ? "The pipeline" : `${found.complete ? "All" : "The"} ${found.pipelines.length} pipelines`}${found.complete ? "" : " that could be looked at"} ${found.pipelines.length === 1 ? "is" : "are"} as meant.`}
      </Text>
    )}
  </Box>
);
