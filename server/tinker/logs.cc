#include "server/tinker/logs.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "server/http/replies.h"
#include "server/tinker/credentials.h"
#include "server/tinker/sessions.h"
#include "server/tinker/training.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// Not the beginning of hexadecimal digits, which are the ids of one log.
constexpr absl::string_view kPrefix = "log";
constexpr size_t kDigits = 3;

constexpr char kMisdirected[] = "the request is for log ";
constexpr int kMisdirectedStatus = 421;

constexpr absl::string_view kRunPath = "training_runs/*";

// Returns the id that says which log has what the request is for; empty if the
// request names none, so that any log serves it.
std::string IdOf(const Route& route, const Call& call) {
  if (call.train != nullptr) return call.train->model;
  const absl::string_view path = route.path;
  if (path == kRunPath || absl::StartsWith(path, "sessions/*") ||
      absl::StartsWith(path, "samplers/*")) {
    return call.args[0];
  }
  for (const char* const field :
       {"session_id", "model_id", "sampling_session_id", "request_id"}) {
    const absl::StatusOr<std::string> id = Text(call.body, field, "");
    if (id.ok() && !id->empty()) return *id;
  }
  return "";
}

HttpReply Misdirected(int log, const std::string& door,
                      const absl::StatusOr<std::string>& owner) {
  if (!owner.ok()) return ErrorReply(owner.status());
  const std::string text =
      absl::StrCat(kMisdirected, log, ", which the server at ", *owner, " has");
  if (door.empty()) return ErrorReply(absl::UnavailableError(text));
  HttpReply reply = JsonReply({{"detail", text}}, kMisdirectedStatus);
  reply.headers.emplace_back(kOwnerHeader, *owner);
  return reply;
}

}  // namespace

std::string LogPrefix(const Front& front) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  if (engine == nullptr || engine->info().num_logs == 1) return "";
  return absl::StrFormat("%s%03d", kPrefix, engine->info().log);
}

std::optional<int> LogOf(absl::string_view id) {
  if (!absl::ConsumePrefix(&id, kPrefix) || id.size() < kDigits) {
    return std::nullopt;
  }
  int log = 0;
  for (const char digit : id.substr(0, kDigits)) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(digit))) {
      return std::nullopt;
    }
    log = 10 * log + (digit - '0');
  }
  return log;
}

absl::StatusOr<std::string> NewSessionId(const Front& front) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, NewId());
  const std::string prefix = LogPrefix(front);
  return absl::StrCat(prefix, id.substr(prefix.size()));
}

std::optional<int> OtherLogOf(const Front& front, const Route& route,
                              const Call& call) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  if (engine == nullptr || engine->info().num_logs == 1 || !front.restored) {
    return std::nullopt;
  }
  const std::string id = IdOf(route, call);
  if (id.empty() || front.sessions.Has(std::string(SessionOf(id)))) {
    return std::nullopt;
  }
  const EngineInfo& info = engine->info();
  // Sessions without a log are of a time when the state had one. The copy of a
  // checkpoint is a run without a session, and in any log.
  const int log = LogOf(id).value_or(route.path == kRunPath ? info.log : 0);
  if (log == info.log || log >= info.num_logs) return std::nullopt;
  return log;
}

void SendToLog(Front& front, int log, const Call& call,
               const Respond& respond) {
  const uint64_t number = ++front.last_misdirected;
  front.misdirected[number] = respond;
  front.port.core()->engine.Peek()->FindOwner(
      log, [&front, port = front.port, log, number,
            door = call.http.door](const absl::StatusOr<std::string>& owner) {
        port.Post([&front, log, number, door, owner] {
          front.misdirected.extract(number).mapped()(
              Misdirected(log, door, owner));
        });
      });
}

}  // namespace weft::server::tinker
