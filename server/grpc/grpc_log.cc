#include "server/grpc/grpc_log.h"

#include <atomic>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "grpc/support/log.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"

namespace weft::server {
namespace {

constexpr int kLinesPerSecond = 10;

void WriteLine(gpr_log_func_args* args) {
  // Threads may race when a new second begins. That adds only a few lines.
  static std::atomic<int64_t> second{0};
  static std::atomic<int> lines{0};
  const int64_t now = absl::ToUnixSeconds(SteadyNow());
  if (second.exchange(now) != now) lines = 0;
  if (++lines > kLinesPerSecond) return;
  Log(args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning
                                               : LogLevel::kDebug,
      "grpc", {{"message", args->message}});
  // gRPC ends the process after this line.
  if (absl::StartsWith(args->message, "assertion failed")) {
    FlushLog(absl::Milliseconds(100));
  }
}

}  // namespace

void TakeOverGrpcLog() { gpr_set_log_function(WriteLine); }

}  // namespace weft::server
