// Reads the JSON form of a prompt or of a training sequence.
#ifndef WEFT_SERVER_TINKER_MODEL_INPUT_H_
#define WEFT_SERVER_TINKER_MODEL_INPUT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Returns the tokens of the field `name` of `object`. The field has the form
// {"chunks": [{"type": "encoded_text", "tokens": [...]}]}.
// Errors: INVALID_ARGUMENT; UNIMPLEMENTED for a chunk that is not text.
// Threads: any.
[[nodiscard]] absl::StatusOr<std::vector<int32_t>> ReadModelInput(
    const Json& object, const char* name);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_MODEL_INPUT_H_
