// The only place that catches exceptions: LibTorch throws, and the rest of Weft
// returns absl::Status.
#ifndef WEFT_SRC_RUNTIME_TORCH_GUARD_H_
#define WEFT_SRC_RUNTIME_TORCH_GUARD_H_

#include <functional>

#include "absl/status/status.h"

namespace weft::engine {

// Runs `body` and converts exceptions. Out of memory becomes
// RESOURCE_EXHAUSTED, and an operation that LibTorch lacks becomes
// UNIMPLEMENTED. Anything else becomes INTERNAL, because validation should have
// refused it. `what` names the work in the message and the log.
[[nodiscard]] absl::Status RunGuarded(const char* what,
                                      const std::function<void()>& body);

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_TORCH_GUARD_H_
