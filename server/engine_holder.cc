#include "server/engine_holder.h"

namespace weft {

absl::StatusOr<Engine*> EngineHolder::Get() const {
  if (draining()) {
    return absl::UnavailableError(
        "the server is draining and takes no new work");
  }
  Engine* const engine = engine_.load();
  if (engine == nullptr) {
    return absl::UnavailableError("the server is starting");
  }
  return engine;
}

}  // namespace weft
