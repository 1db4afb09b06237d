// What a failed call says: the gRPC status, and the google.rpc messages in its details (docs/errors.md).
#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <vector>

struct Failure {
  grpc::StatusCode code;
  std::string message;
  std::string reason;               // empty where the status came from gRPC itself
  std::vector<std::string> advice;  // each wrong field, and when to come back

  explicit Failure(const grpc::Status &status);

  // Whether the same call may succeed later. Once accepted it may not: the work has begun.
  bool is_worth_a_retry(bool accepted) const;

  // Lines for a person.
  std::string text() const;
};
