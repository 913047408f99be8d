// Gives handlers the engine. There is none while the daemon starts, and new
// work is refused while the daemon drains.
#ifndef WEFT_SERVER_ENGINE_HOLDER_H_
#define WEFT_SERVER_ENGINE_HOLDER_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "src/engine/engine.h"

namespace weft {

// Threads: any.
// Ownership: the caller of Set owns the engine, which outlives the server.
class EngineHolder {
 public:
  // Sets the engine when it is ready. Call it once.
  void Set(Engine* engine) { engine_.store(engine); }

  // Refuses new work from now on.
  void StartDraining() { draining_.store(true); }
  [[nodiscard]] bool draining() const { return draining_.load(); }

  // Returns the engine for new work. Errors: UNAVAILABLE while starting or
  // draining.
  [[nodiscard]] absl::StatusOr<Engine*> Get() const;

  // Returns the engine, even during a drain; nullptr while starting.
  [[nodiscard]] Engine* Peek() const { return engine_.load(); }

 private:
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
};

}  // namespace weft

#endif  // WEFT_SERVER_ENGINE_HOLDER_H_
