// Sends one chat prompt to a Pagemill gateway and prints the answer as it comes.
//
//     node chat.js PROMPT [MAX_TOKENS]
//
// The answer goes to stdout, everything else to stderr. Exit status: 0 answered, 1 failed, 2 wrong usage, 75 failed
// but worth another attempt, 130 interrupted.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { describe, isWorthARetry } from "./errors.js";

const DEADLINE_S = 120;
const EXIT = { FAILED: 1, USAGE: 2, TRY_AGAIN: 75, INTERRUPTED: 130 };

const PROTO = fileURLToPath(new URL("../../../proto", import.meta.url));
const definition = protoLoader.loadSync("pagemill/v1/inference.proto", {
  includeDirs: [PROTO],
  keepCase: true,
  enums: String,
  longs: String, // a seed is an int64, which a number cannot hold
  defaults: true,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pagemill.v1;

/** Prints the stream to its end; resolves when it is complete, throws grpc's ServiceError when the call fails. */
async function printAnswer(call, seen) {
  for await (const message of call) {
    seen.accepted = true; // the first message is always Accepted
    if (message.event === "delta") {
      process.stdout.write(message.delta.text);
    } else if (message.event === "finished") {
      const { reason, usage } = message.finished;
      process.stdout.write("\n");
      console.error(
        `${reason}: ${usage.prompt_tokens} prompt tokens (${usage.cached_tokens} cached), ` +
          `${usage.completion_tokens} generated`,
      );
    }
  }
}

async function main([prompt, maxTokens = "256", ...rest]) {
  if (prompt === undefined || rest.length > 0 || !/^\d{1,9}$/.test(maxTokens)) {
    console.error("usage: node chat.js PROMPT [MAX_TOKENS]");
    return EXIT.USAGE;
  }
  // Pagemill has no TLS yet: clear text is for loopback, Unix sockets and private networks.
  const target = process.env.PAGEMILL_TARGET || "127.0.0.1:50051";
  const client = new InferenceService(target, grpc.credentials.createInsecure());
  const call = client.Generate(
    {
      chat: { messages: [{ role: "user", content: prompt }] },
      stopping: { max_tokens: Number(maxTokens) },
    },
    { deadline: Date.now() + DEADLINE_S * 1000 },
  );
  // Cancelling ends the work in the service too. Once only: a second Ctrl-C ends this process the usual way.
  process.once("SIGINT", () => call.cancel());
  process.stdout.on("error", () => call.cancel()); // nobody reads any more, as in `| head`

  const seen = { accepted: false };
  try {
    await printAnswer(call, seen);
    return 0;
  } catch (error) {
    console.error(describe(error));
    if (error.code === grpc.status.CANCELLED) {
      return EXIT.INTERRUPTED;
    }
    return isWorthARetry(error, seen.accepted) ? EXIT.TRY_AGAIN : EXIT.FAILED;
  } finally {
    client.close();
  }
}

process.exitCode = await main(process.argv.slice(2));
