import { Alert } from "@chakra-ui/react";
import type { ReactNode } from "react";

export const Note = ({
  children,
  status,
  title,
}: {
  readonly children?: ReactNode;
  readonly status: "error" | "info" | "success" | "warning";
  readonly title: string;
}) => (
  <Alert.Root mb={3} role={status === "error" ? "alert" : "status"} size="sm" status={status}>
    <Alert.Indicator />
    <Alert.Content>
      <Alert.Title>{title}</Alert.Title>
      <Alert.Description>{children}</Alert.Description>
    </Alert.Content>
  </Alert.Root>
);
