// Where handlers find the engine: not there while the daemon starts, refused
// while it drains.
#ifndef WEFT_SERVER_ENGINE_HOLDER_H_
#define WEFT_SERVER_ENGINE_HOLDER_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "src/engine/engine.h"

namespace weft {

// Threads: any.
// Ownership: the engine belongs to the caller of Set and outlives the server
// whose handlers use this.
class EngineHolder {
 public:
  // The engine is ready. Called once.
  void Set(Engine* engine) { engine_.store(engine); }

  // Refuses new work from now on.
  void StartDraining() { draining_.store(true); }
  [[nodiscard]] bool draining() const { return draining_.load(); }

  // The engine for new work. UNAVAILABLE while starting or draining.
  [[nodiscard]] absl::StatusOr<Engine*> Get() const;

  // The engine whatever its state, or nullptr while starting.
  [[nodiscard]] Engine* Peek() const { return engine_.load(); }

 private:
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
};

}  // namespace weft

#endif  // WEFT_SERVER_ENGINE_HOLDER_H_
