// Bounds the requests that a client sends at the same time. gRPC keeps what has
// come of a message, as far as --max-message-bytes, and has one bound for all
// clients, above which it ends calls of anybody. What a call has not begun to
// read stays with the client, except for one window of HTTP/2.
#ifndef WEFT_SERVER_CALL_READ_TURNS_H_
#define WEFT_SERVER_CALL_READ_TURNS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// Threads: any.
class ReadTurns {
 public:
  static constexpr int kAtOnce = 4;
  // Each fills a window of HTTP/2 while it waits.
  static constexpr size_t kMostWaiting = 1024;
  using Read = std::function<void()>;

  // Runs `read` when `client` reads fewer than kAtOnce messages: now or later.
  // The first that ask are the first. `call` is for Remove. Returns false, and
  // never runs `read`, if kMostWaiting wait.
  [[nodiscard]] bool Begin(const std::string& client, const void* call,
                           Read read) ABSL_LOCKS_EXCLUDED(mu_);
  // The client has one message less to read.
  void End(const std::string& client) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether the call waited for its turn, which it no longer gets.
  bool Remove(const std::string& client, const void* call)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Line {
    int num_reading = 0;
    std::deque<std::pair<const void*, Read>> waiting;
  };

  Mutex mu_;
  // A client that reads nothing has no entry.
  std::map<std::string, Line> lines_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_READ_TURNS_H_
