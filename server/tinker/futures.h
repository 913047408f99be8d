// Futures: what a client was promised, and how it waits for it.
#ifndef WEFT_SERVER_TINKER_FUTURES_H_
#define WEFT_SERVER_TINKER_FUTURES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/time/time.h"
#include "server/tinker/errors.h"
#include "server/tinker/http_message.h"

namespace weft::tinker {

// How long a retrieval waits before it says "try again". The SDK gives up at
// 45 s.
inline constexpr absl::Duration kLongPoll = absl::Seconds(30);
// A larger result is announced before it is sent: the SDK makes room first.
inline constexpr size_t kAnnouncedBytes = size_t{1} << 20;

// A result: JSON, or protobuf that `to_json` can spell as JSON.
struct FutureResult {
  std::string body;
  std::string (*to_json)(const std::string& protobuf) = nullptr;

  [[nodiscard]] static FutureResult Of(const Json& json);
  [[nodiscard]] static FutureResult Failed(const absl::Status& status) {
    return Of(FailureOf(status));
  }
};

// Threads: the front's.
class Futures {
 public:
  using After = std::function<void(absl::Duration, std::function<void()>)>;

  // Finished futures take at most `max_bytes`. Beyond, the owner whose results
  // take the most loses its oldest. `after` runs a function later.
  Futures(int64_t max_bytes, After after)
      : max_bytes_(max_bytes), after_(std::move(after)) {}

  // Begins a future of `owner` (a tenant). False: there is one of this id.
  bool Open(const std::string& id, const std::string& owner);
  [[nodiscard]] bool Has(const std::string& id) const;
  // Forgets one that was opened: the client may ask again.
  void Drop(const std::string& id);
  // Without effect on one that is unknown or finished.
  void Finish(const std::string& id, FutureResult result);

  // Answers once the result is there, or with "try_again" after kLongPoll.
  // 410 for a future that is not known, or another owner's.
  void Retrieve(const std::string& id, const std::string& owner,
                bool allow_metadata, bool protobuf, Respond respond);

 private:
  struct Waiter {
    bool allow_metadata;
    bool protobuf;
    Respond respond;
  };
  struct Future {
    std::string owner;
    bool finished = false;
    FutureResult result;
    std::unordered_map<uint64_t, Waiter> waiters;
  };

  // What one owner's finished futures take.
  struct Account {
    std::deque<std::string> finished;  // Oldest first.
    int64_t bytes = 0;
  };

  static void Answer(const Future& future, const Waiter& waiter);
  void GiveUp(const std::string& id, uint64_t waiter);
  void Charge(const Future& future, const std::string& id);
  // Forgets the oldest result of the owner with the most, but for `newest`.
  bool ForgetOne(const std::string& newest);

  const int64_t max_bytes_;
  const After after_;
  std::unordered_map<std::string, Future> futures_;
  std::map<std::string, Account> accounts_;  // Those with results.
  int64_t bytes_ = 0;
  uint64_t next_waiter_ = 0;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FUTURES_H_
