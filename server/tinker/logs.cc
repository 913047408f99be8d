#include "server/tinker/logs.h"

#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "server/http/replies.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/ledger.h"
#include "server/tinker/sessions.h"
#include "server/tinker/training.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// Not the beginning of hexadecimal digits, which are the ids of one log.
constexpr absl::string_view kPrefix = "log";
constexpr size_t kDigits = 3;

constexpr char kMisdirected[] =
    "the request is for a session that the server at ";
constexpr char kArriving[] = "the session is arriving: try again";
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

HttpReply Misdirected(const std::string& door,
                      const absl::StatusOr<std::string>& owner) {
  if (!owner.ok()) return ErrorReply(owner.status());
  const std::string text = absl::StrCat(kMisdirected, *owner, " has");
  if (door.empty()) return ErrorReply(absl::UnavailableError(text));
  HttpReply reply = JsonReply({{"detail", text}}, kMisdirectedStatus);
  reply.headers.emplace_back(kOwnerHeader, *owner);
  return reply;
}

// Returns whether the request is served while the session is on its way.
bool IsServedMeanwhile(const Front& front, const Route& route,
                       const Call& call) {
  return route.action == Action(BeatSession) ||
         (route.action == Action(RetrieveFuture) &&
          front.futures.Has(Text(call.body, "request_id", "").value_or("")));
}

// Answers the request when it is known who has the session.
void AskOwner(Front& front, const std::string& session, int home,
              const CallPtr& call, const Respond& respond,
              const std::function<void()>& serve) {
  const uint64_t number = ++front.last_misdirected;
  front.misdirected[number] = [&front, session, call, respond, serve](
                                  const absl::StatusOr<std::string>& owner) {
    if (!absl::IsNotFound(owner.status())) {
      return respond(Misdirected(call->http.door, owner));
    }
    // It may have come here meanwhile.
    SyncSession(front, session);
    if (!front.sessions.Has(session)) return serve();
    Fail(respond, absl::UnavailableError(kArriving));
  };
  front.port.core()->engine.Peek()->FindOwner(
      IsSessionId(session) ? session : "", home,
      [&front, port = front.port,
       number](const absl::StatusOr<std::string>& owner) {
        port.Post([&front, number, owner] {
          front.misdirected.extract(number).mapped()(owner);
        });
      });
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

bool IsElsewhere(Front& front, const Route& route, const CallPtr& call,
                 const Respond& respond, const std::function<void()>& serve) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  if (engine == nullptr || engine->info().num_logs == 1 || !front.restored) {
    return false;
  }
  const std::string id = IdOf(route, *call);
  if (id.empty()) return false;
  const std::string session(SessionOf(id));
  SyncSession(front, session);
  const absl::Status held = engine->CheckHeld(session);
  const bool arrives = front.arriving.contains(session);
  const bool has = front.sessions.Has(session);
  if (!held.ok() || arrives) {
    if (has && IsServedMeanwhile(front, route, *call)) return false;
    Fail(respond, arrives ? absl::UnavailableError(kArriving) : held);
    return true;
  }
  if (has) return false;
  // Sessions without a log are of a time when the state had one. The copy of a
  // checkpoint is a run without a session, and in any log.
  const std::optional<int> log = LogOf(id);
  if (!log && route.path == kRunPath) return false;
  const int home = log.value_or(0);
  // What is of no session stays where it was made.
  const bool is_here =
      home == engine->info().log || home >= engine->info().num_logs;
  if (is_here && !IsSessionId(session)) return false;
  AskOwner(front, session, home, call, respond, serve);
  return true;
}

}  // namespace weft::server::tinker
