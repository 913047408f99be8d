// Turns exceptions of LibTorch into absl::Status, which the rest of Weft
// returns.
#ifndef WEFT_SRC_ENGINE_TORCH_GUARD_H_
#define WEFT_SRC_ENGINE_TORCH_GUARD_H_

#include <functional>

#include "absl/status/status.h"

namespace weft::engine {

// Runs `body` and converts exceptions. Exhausted device memory and
// std::bad_alloc become RESOURCE_EXHAUSTED. An operation that LibTorch lacks
// becomes UNIMPLEMENTED. Any other std::exception becomes INTERNAL. `what`
// names the work in the message and the log.
[[nodiscard]] absl::Status RunGuarded(const char* what,
                                      const std::function<void()>& body);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TORCH_GUARD_H_
