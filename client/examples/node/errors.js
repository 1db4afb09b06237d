// What a failed call says: the gRPC status, and the google.rpc messages in its details (docs/errors.md).

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

const types = protobuf.loadSync(fileURLToPath(new URL("../error_details.proto", import.meta.url)));
const Status = types.lookupType("google.rpc.Status");

/** The details by type name, such as `ErrorInfo`; empty where the status came from gRPC itself. */
function detailsOf(error) {
  const found = {};
  for (const raw of error.metadata.get("grpc-status-details-bin")) {
    for (const { type_url, value } of Status.decode(raw).details) {
      const name = type_url.slice(type_url.lastIndexOf("/") + 1);
      const type = types.lookup(name, protobuf.Type); // null: a kind of detail that this program does not know
      if (type !== null) {
        found[type.name] = type.toObject(type.decode(value), { longs: Number, defaults: true });
      }
    }
  }
  return found;
}

/** Whether the same call may succeed later. From the first message on it may not: the work has begun. */
export function isWorthARetry(error, accepted) {
  const isTold = "ErrorInfo" in detailsOf(error);
  // Without a reason, RESOURCE_EXHAUSTED is a message that is too large, and UNAVAILABLE a lost connection.
  const isTemporary =
    error.code === grpc.status.UNAVAILABLE || (error.code === grpc.status.RESOURCE_EXHAUSTED && isTold);
  return isTemporary && !accepted;
}

/** Lines for a person: status and reason, then each wrong field, then when to come back. */
export function describe(error) {
  const { ErrorInfo, BadRequest, RetryInfo } = detailsOf(error);
  const reason = ErrorInfo ? ` (${ErrorInfo.reason})` : "";
  const lines = [`${grpc.status[error.code]}${reason}: ${error.details}`];
  for (const { field, description } of BadRequest?.fieldViolations ?? []) {
    lines.push(`  ${field}: ${description}`);
  }
  if (RetryInfo) {
    const { seconds, nanos } = RetryInfo.retryDelay;
    lines.push(`  try again in ${seconds + nanos / 1e9} s`);
  }
  return lines.join("\n");
}
