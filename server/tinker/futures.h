// Keeps futures: results that the front owes to clients. Also keeps the
// requests of clients that wait for a result.
#ifndef WEFT_SERVER_TINKER_FUTURES_H_
#define WEFT_SERVER_TINKER_FUTURES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/time/time.h"
#include "server/http/fair_budget.h"
#include "server/http/message.h"
#include "server/tinker/errors.h"
#include "src/base/fair_eviction.h"
#include "src/base/tokens.h"

namespace weft::server::tinker {

// retrieve_future waits this long for a result before it responds 408.
// The SDK gives up after 45 s.
inline constexpr absl::Duration kLongPoll = absl::Seconds(30);
// If a result has more bytes than this, a client that sends
// `allow_metadata_only` gets only the size. The client can then make room and
// ask again.
inline constexpr size_t kAnnouncedBytes = size_t{1} << 20;

// A result: JSON, or protobuf if `to_json` is set. `to_json` converts the
// protobuf to JSON.
struct FutureResult {
  std::string body;
  std::string (*to_json)(const std::string& protobuf) = nullptr;

  // Make a result: from JSON, or from the error of a future that failed.
  static FutureResult Of(const Json& json);
  static FutureResult Failed(const absl::Status& status) {
    return Of(FailureOf(status));
  }
};

// Threads: the front's.
class Futures {
 public:
  using After = std::function<void(absl::Duration, std::function<void()>)>;

  // Charges `memory` for results that clients fetch. While all results together
  // have more than `max_bytes`, one is forgotten (FairEviction). The newest
  // result of all owners is never forgotten.
  // `after` runs a function after a delay.
  Futures(int64_t max_bytes, std::shared_ptr<FairBudget> memory, After after)
      : max_bytes_(max_bytes),
        memory_(std::move(memory)),
        after_(std::move(after)) {}

  // Makes a future for `owner`, from a request that needed `scope`. Returns
  // false if a future has this id already.
  bool Open(const std::string& id, const std::string& owner, Scope scope);
  // Returns when a client last opened this future, tried to, or waited for its
  // result: a SteadyNow, or the infinite future while a client waits. The
  // infinite past if there is no such future.
  absl::Time LastAsked(const std::string& id) const;
  // Returns true if there is a future with this id, with or without a result.
  bool Has(const std::string& id) const;
  // Returns the scope that Open got, or kRead if `owner` has no such future.
  Scope ScopeOf(const std::string& id, const std::string& owner) const;
  // Forgets a future that has no result. Responds with 410 to the clients that
  // wait for the result, so that they send the future's request again.
  void Drop(const std::string& id);
  // Does the same for all whose ids begin with `prefix`.
  void DropOpen(const std::string& prefix);
  // Gives the future its result, and answers the clients that wait for it. Does
  // nothing if the future is unknown or has a result.
  void Finish(const std::string& id, FutureResult result);

  // Responds with the result as soon as there is one, or with 408 after
  // kLongPoll. Responds with 410 if the future is unknown, was forgotten, or
  // has another owner. All clients that fetch a large result at a time share
  // one buffer; if the owner has no memory left for it, responds with 429 or
  // 503.
  // `protobuf`: the client takes protobuf; otherwise a result above 4 MiB that
  // is protobuf is refused with 400. `allow_metadata`: the client takes the
  // size of a result above kAnnouncedBytes in place of the result.
  void Retrieve(const std::string& id, const std::string& owner,
                bool allow_metadata, bool protobuf, Respond respond);

 private:
  struct Waiter {
    bool allow_metadata;
    bool protobuf;
    Respond respond;
  };
  using Bytes = std::shared_ptr<const std::string>;
  // A large result in one form, while clients fetch it.
  struct Sending {
    Bytes bytes;
    std::shared_ptr<void> reserved;
  };
  struct Future {
    std::string owner;
    Scope scope = Scope::kRead;
    Bytes result;  // Null until the future is finished.
    std::string (*to_json)(const std::string& protobuf) = nullptr;
    std::weak_ptr<const Sending> as_it_is;
    std::weak_ptr<const Sending> as_json;
    std::unordered_map<uint64_t, Waiter> waiters;
    absl::Time asked;  // Without the clients that wait.
  };

  void Answer(Future& future, const Waiter& waiter);
  // Returns the reply with a result of the future in the form `bytes`.
  HttpReply Send(const Future& future, const Bytes& bytes,
                 std::weak_ptr<const Sending>* last);
  void GiveUp(const std::string& id, uint64_t waiter);

  const int64_t max_bytes_;
  const std::shared_ptr<FairBudget> memory_;
  const After after_;
  std::unordered_map<std::string, Future> futures_;
  FairEviction<std::string> finished_;  // The ids of futures with a result.
  uint64_t next_waiter_ = 0;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_FUTURES_H_
