// Sends one chat prompt to a Pagemill gateway and prints the answer as it comes.
//
//     chat PROMPT [MAX_TOKENS]
//
// The answer goes to stdout, everything else to stderr. Exit status: 0 answered, 1 failed, 2 wrong usage, 75 failed
// but worth another attempt, 130 interrupted.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "failure.h"
#include "pagemill/v1/inference.grpc.pb.h"

namespace pm = pagemill::v1;

namespace {

constexpr std::chrono::seconds kDeadline{120};
constexpr uint32_t kMaxTokens = 256;

enum Exit { kAnswered = 0, kFailed = 1, kUsage = 2, kTryAgain = 75, kInterrupted = 130 };

// Cancels a call on Ctrl-C, which ends the work in the service too. A signal handler may not call gRPC, so a thread
// waits for the signal instead.
class Interrupt {
 public:
  // Call it before gRPC starts threads: they inherit that the signal is left to the one that waits for it.
  static void block() {
    const sigset_t signals = interrupts();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  }

  explicit Interrupt(grpc::ClientContext &context)
      : waiter_([&context] {
          const sigset_t signals = interrupts();
          int number;
          sigwait(&signals, &number);
          context.TryCancel();
        }) {}

  ~Interrupt() {
    pthread_kill(waiter_.native_handle(), SIGINT);  // cancelling a call that is over does nothing
    waiter_.join();
  }

 private:
  static sigset_t interrupts() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    return signals;
  }

  std::thread waiter_;
};

std::optional<pm::GenerateRequest> parse(int argc, char **argv) {
  if (argc != 2 && argc != 3) return std::nullopt;
  uint32_t max_tokens = kMaxTokens;
  if (argc == 3) {
    const std::string_view text = argv[2];
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), max_tokens);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  }
  pm::GenerateRequest request;
  pm::ChatMessage *message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(argv[1]);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  return request;
}

void show(const pm::GenerateResponse &response) {
  if (response.has_delta()) {
    std::cout << response.delta().text() << std::flush;
  } else if (response.has_finished()) {
    const pm::Usage &usage = response.finished().usage();
    std::cout << std::endl;
    std::cerr << pm::FinishReason_Name(response.finished().reason()) << ": " << usage.prompt_tokens()
              << " prompt tokens (" << usage.cached_tokens() << " cached), " << usage.completion_tokens()
              << " generated\n";
  }
}

}  // namespace

int main(int argc, char **argv) {
  const std::optional<pm::GenerateRequest> request = parse(argc, argv);
  if (!request) {
    std::cerr << "usage: chat PROMPT [MAX_TOKENS]\n";
    return kUsage;
  }
  const char *set = std::getenv("PAGEMILL_TARGET");
  const std::string target = set && *set ? set : "127.0.0.1:50051";

  Interrupt::block();
  // Pagemill has no TLS yet: clear text is for loopback, Unix sockets and private networks.
  const auto stub = pm::InferenceService::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const Interrupt interrupt(context);

  const auto stream = stub->Generate(&context, *request);
  bool accepted = false;
  for (pm::GenerateResponse response; stream->Read(&response);) {
    accepted = true;  // the first message is always Accepted
    show(response);
  }
  const grpc::Status status = stream->Finish();
  if (status.ok()) return kAnswered;
  const Failure failure(status);
  std::cerr << failure.text() << '\n';
  if (failure.code == grpc::StatusCode::CANCELLED) return kInterrupted;
  return failure.is_worth_a_retry(accepted) ? kTryAgain : kFailed;
}
