// Reads large bodies on a thread of its own, so that the front's thread goes on
// serving others meanwhile.
#ifndef WEFT_SERVER_TINKER_BODY_TURNS_H_
#define WEFT_SERVER_TINKER_BODY_TURNS_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/tinker/owner_turns.h"
#include "src/base/worker.h"

namespace weft::tinker {

// Reads one body at a time. Owners take turns, so that nobody waits for more
// than one body of each other owner. Threads: the front's.
class BodyTurns {
 public:
  using Work = std::function<void()>;

  // `after` runs work on the front's thread after a delay; any thread calls it.
  explicit BodyTurns(std::function<void(absl::Duration, Work)> after)
      : after_(std::move(after)) {}

  // Runs `read` on the reader's thread in the owner's turn, and then `serve` on
  // the front's thread.
  void Add(const std::string& owner, Work read, Work serve);

 private:
  struct Body {
    Work read;
    Work serve;
  };

  // Begins to read the next body, unless one is being read.
  void Next();

  const std::function<void(absl::Duration, Work)> after_;
  OwnerTurns<Body> waiting_;
  bool reading_ = false;
  Worker reader_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_BODY_TURNS_H_
