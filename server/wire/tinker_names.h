// The names of the adapters that the Tinker front makes.
#ifndef WEFT_SERVER_WIRE_TINKER_NAMES_H_
#define WEFT_SERVER_WIRE_TINKER_NAMES_H_

#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace weft::server {

// Returns whether the adapter is a model: SESSION.train.N, where SESSION has 32
// characters.
inline bool IsModelAdapter(absl::string_view adapter_id) {
  constexpr size_t kSessionLength = 32;
  return adapter_id.size() > kSessionLength &&
         absl::StartsWith(adapter_id.substr(kSessionLength), ".train.");
}

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_TINKER_NAMES_H_
