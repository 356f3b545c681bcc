// The component that Airflow shows in all places; where it is, it finds out by itself, since Airflow loads it once.
import { Box, Button, Heading, Link, Skeleton, Text } from "@chakra-ui/react";
import { Link as RouterLink, useLocation, useSearchParams } from "react-router-dom";

import { overview } from "./api";
import { Detail } from "./Detail";
import { Empty, List, Title, total } from "./List";
import { Note } from "./Note";
import { useAnswer } from "./useAnswer";

type Places = { readonly dagId?: string; readonly runId?: string; readonly taskId?: string };

const Page = () => {
  const [parameters] = useSearchParams();
  const [kafka, name] = [parameters.get("kafka"), parameters.get("name")];
  const { data, failure } = useAnswer("pipelines", () => overview());
  if (kafka !== null && name !== null) {
    return (
      <Box p={4}>
        <Button asChild mb={2} size="xs" variant="ghost">
          <RouterLink to="/plugin/bottledwater">‹ All pipelines</RouterLink>
        </Button>
        <Detail of={{ kafka, name }} />
      </Box>
    );
  }
  return (
    <Box p={4}>
      <Title found={data} />
      {failure !== undefined && <Note status="error" title={failure.message} />}
      {data === undefined ? failure === undefined && <Skeleton h="120px" /> : <List found={data} />}
    </Box>
  );
};

/** The pipelines of a DAG: one is shown at once. */
const Tab = ({ dagId }: { readonly dagId: string }) => {
  const { data, failure } = useAnswer(dagId, () => overview(dagId));
  if (data === undefined) {
    return <Box p={4}>{failure === undefined ? <Skeleton h="120px" /> : <Note status="error" title={failure.message} />}</Box>;
  }
  const [first] = data.pipelines;
  if (data.unbegun.length > 0) return <Box p={4}><List found={data} /></Box>;
  if (first === undefined) {
    return (
      <Box p={4}>
        <Empty dagId={dagId} kafkas={data.kafkas} />
      </Box>
    );
  }
  return <Box p={4}>{data.pipelines.length === 1 ? <Detail of={first} /> : <List found={data} />}</Box>;
};

const Card = () => {
  const { data, failure } = useAnswer("card", () => overview(), () => 15_000);
  if (data === undefined && failure === undefined) return null;
  const all = data === undefined ? 0 : total(data);
  const slots = [...(data?.unbegun ?? []), ...(data?.pipelines ?? [])].map((each) => each.slot);
  const away = Object.values(data?.away ?? {});
  const bad = (data?.wrong ?? 0) > 0 || away.length > 0 || failure !== undefined;
  return (
    <Box borderWidth="1px" borderRadius="md" p={4} w="100%">
      <Heading mb={1} size="sm">
        <Link asChild>
          <RouterLink to="/plugin/bottledwater">Bottled Water</RouterLink>
        </Link>
      </Heading>
      <Text color={bad ? "fg.error" : "fg.muted"} fontSize="sm">
        {failure?.message ??
          away[0] ??
          (all === 0
            ? "No pipeline yet."
            : data?.wrong
              ? `${data.wrong} of ${all} ${data.wrong === 1 ? "needs" : "need"} you: ${slots.slice(0, Math.min(3, data.wrong)).join(", ")}${data.wrong > 3 ? " …" : ""}`
              : `${all === 1 ? "1 pipeline is" : `All ${all} pipelines are`} as meant.`)}
      </Text>
    </Box>
  );
};

const BottledWater = ({ dagId }: Places) => {
  const { pathname } = useLocation();
  if (dagId !== undefined) return <Tab dagId={dagId} />;
  return pathname.includes("/plugin/") ? <Page /> : <Card />;
};

export default BottledWater;
