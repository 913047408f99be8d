// Gives the engine to the handlers of calls. There is no engine while the
// daemon starts. While the daemon drains, new work gets no engine.
#ifndef WEFT_SERVER_ENGINE_HOLDER_H_
#define WEFT_SERVER_ENGINE_HOLDER_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "src/engine/engine.h"

namespace weft {

// Threads: any.
// Ownership: the caller of Set owns the engine. The engine outlives the server.
class EngineHolder {
 public:
  // Sets the engine. Call it once, when the engine can take work.
  void Set(Engine* engine) { engine_.store(engine); }

  // Refuses new work from now on.
  void StartDraining() { draining_.store(true); }
  [[nodiscard]] bool draining() const { return draining_.load(); }

  // Returns the engine for new work. Errors: UNAVAILABLE while the daemon
  // starts or drains.
  [[nodiscard]] absl::StatusOr<Engine*> Get() const;

  // Returns the engine, even during a drain; null while the daemon starts.
  [[nodiscard]] Engine* Peek() const { return engine_.load(); }

 private:
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
};

}  // namespace weft

#endif  // WEFT_SERVER_ENGINE_HOLDER_H_
