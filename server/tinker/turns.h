// Threads for the work of many owners, who take turns.
#ifndef WEFT_SERVER_TINKER_TURNS_H_
#define WEFT_SERVER_TINKER_TURNS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::server::tinker {

// Runs work that takes long on threads of its own, so that the front's thread
// goes on serving others meanwhile. Nobody waits for more than one piece of
// work of each other owner. The class Worker (src/base/threads/worker.h) has
// one thread and one queue instead.
// Threads: any.
class TurnPool {
 public:
  using Work = std::function<void()>;

  explicit TurnPool(size_t num_threads);
  // Waits for the work that runs. Work that waits does not run.
  ~TurnPool();
  TurnPool(const TurnPool&) = delete;
  TurnPool& operator=(const TurnPool&) = delete;

  // Passes `work` to the threads. Other limits bound how much waits: each piece
  // belongs to a connection, to a step whose memory is charged, or to one of
  // few downloads. The threads destroy `work`, so what must end on the front's
  // thread, such as a Respond, has to be moved out of it. A lambda must be
  // mutable, and capture it as `respond = respond`: the plain capture of a
  // const reference is const, so a move would copy it.
  void Run(const std::string& owner, Work work) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the first work of the owner whose turn it is. REQUIRES: work waits.
  Work Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  // The work by owner. An owner without any has no entry.
  std::map<std::string, std::deque<Work>> waiting_ ABSL_GUARDED_BY(mu_);
  // The owner whose turn was last.
  std::string last_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_TURNS_H_
