import { Button, CloseButton, Dialog, Field, HStack, Input, Link, Portal, Text } from "@chakra-ui/react";
import { useState } from "react";
import { Link as RouterLink } from "react-router-dom";

import { act, Failure, type Action, type Detail } from "./api";
import { Note } from "./Note";

type Done = { readonly run?: string; readonly failure?: string };

const Confirm = ({ action, close }: { readonly action: Action; readonly close: () => void }) => {
  const [tables, setTables] = useState("");
  const [busy, setBusy] = useState(false);
  const [done, setDone] = useState<Done>({});
  const named = tables.split(",").map((each) => each.trim()).filter(Boolean);
  const go = async () => {
    setBusy(true);
    try {
      const answer = await act(action, action.tables ? { tables: named } : {});
      setDone({ run: answer.dag_run_id });
    } catch (error) {
      setDone({ failure: error instanceof Failure ? error.message : String(error) });
    }
    setBusy(false);
  };
  return (
    <Dialog.Root onOpenChange={(event) => !event.open && close()} open role="alertdialog">
      <Portal>
        <Dialog.Backdrop />
        <Dialog.Positioner>
          <Dialog.Content>
            <Dialog.Header>
              <Dialog.Title>{action.label}</Dialog.Title>
            </Dialog.Header>
            <Dialog.Body>
              <Text whiteSpace="pre-line">{action.says}</Text>
              <Text color="fg.muted" fontSize="sm" mt={2}>This triggers the DAG {action.dag_id}; its run shows what is done, and Airflow's audit log who has done it.</Text>
              {action.tables && done.run === undefined && (
                <Field.Root mt={3} required>
                  <Field.Label>Tables</Field.Label>
                  <Input autoFocus onChange={(event) => setTables(event.target.value)} placeholder="public.orders, shop.*" value={tables} />
                  <Field.HelperText>[schema.]table with * and ?, with commas between them.</Field.HelperText>
                </Field.Root>
              )}
              {done.failure !== undefined && <Note status="error" title={done.failure} />}
              {done.run !== undefined && (
                <Note status="success" title="Asked for.">
                  <Link asChild><RouterLink to={`/dags/${action.dag_id}/runs/${done.run}`}>See the run</RouterLink></Link>
                </Note>
              )}
            </Dialog.Body>
            <Dialog.Footer>
              <Button onClick={close} variant="outline">{done.run === undefined ? "Cancel" : "Close"}</Button>
              {done.run === undefined && (
                <Button colorPalette={action.danger ? "red" : "blue"} disabled={busy || (action.tables && named.length === 0)} loading={busy} onClick={() => void go()}>
                  {action.label}
                </Button>
              )}
            </Dialog.Footer>
            <Dialog.CloseTrigger asChild>
              <CloseButton size="sm" />
            </Dialog.CloseTrigger>
          </Dialog.Content>
        </Dialog.Positioner>
      </Portal>
    </Dialog.Root>
  );
};

export const Actions = ({ of }: { readonly of: Detail }) => {
  const [chosen, setChosen] = useState<Action>();
  if (of.actions.length === 0) {
    return of.no_actions ? <Text color="fg.muted" fontSize="sm" maxW="500px">{of.no_actions}</Text> : null;
  }
  return (
    <HStack gap={2} wrap="wrap">
      {of.actions.map((action) => (
        <Button
          colorPalette={action.danger ? "red" : undefined}
          disabled={action.impossible !== ""}
          key={action.id}
          onClick={() => setChosen(action)}
          size="xs"
          title={action.impossible || action.says}
          variant="outline"
        >
          {action.label}
        </Button>
      ))}
      {chosen !== undefined && <Confirm action={chosen} close={() => setChosen(undefined)} key={chosen.id} />}
    </HStack>
  );
};
