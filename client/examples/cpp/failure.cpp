#include "failure.h"

#include <google/protobuf/util/time_util.h>

#include <iterator>

#include "error_details.pb.h"

namespace {

const char *name_of(grpc::StatusCode code) {
  static const char *const names[] = {
      "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
      "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
      "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
  };
  return static_cast<size_t>(code) < std::size(names) ? names[code] : "UNKNOWN";
}

}  // namespace

Failure::Failure(const grpc::Status &status) : code(status.error_code()), message(status.error_message()) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  google::rpc::RetryInfo retry;
  for (const google::protobuf::Any &detail : details.details()) {
    if (detail.UnpackTo(&info)) reason = info.reason();
    if (detail.UnpackTo(&bad))
      for (const auto &violation : bad.field_violations())
        advice.push_back(violation.field() + ": " + violation.description());
    if (detail.UnpackTo(&retry))
      advice.push_back("try again in " + google::protobuf::util::TimeUtil::ToString(retry.retry_delay()));
  }
}

bool Failure::is_worth_a_retry(bool accepted) const {
  // Without a reason, RESOURCE_EXHAUSTED is a message that is too large, and UNAVAILABLE a lost connection.
  const bool is_temporary =
      code == grpc::StatusCode::UNAVAILABLE || (code == grpc::StatusCode::RESOURCE_EXHAUSTED && !reason.empty());
  return is_temporary && !accepted;
}

std::string Failure::text() const {
  std::string text = name_of(code);
  if (!reason.empty()) text += " (" + reason + ")";
  text += ": " + message;
  for (const std::string &line : advice) text += "\n  " + line;
  return text;
}
