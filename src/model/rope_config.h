// Rotary frequencies from the fields of config.json. Torch-free.
#ifndef WEFT_SRC_MODEL_ROPE_CONFIG_H_
#define WEFT_SRC_MODEL_ROPE_CONFIG_H_

#include <vector>

#include "absl/status/statusor.h"
#include "src/model/json_fields.h"

namespace weft::model {

// Reads rope_parameters, or rope_theta with rope_scaling, as the releases of
// transformers spell them.
// Shapes: returns [head_dim / 2], scaling (default, linear, llama3) applied.
// Errors: UNIMPLEMENTED for another kind of scaling or another field;
//         INVALID_ARGUMENT for values out of range or spellings that disagree.
// Source: Su et al. 2021 (theta^(-2i/d)); Llama 3.1's piecewise scaling.
[[nodiscard]] absl::StatusOr<std::vector<double>> ReadInverseFrequencies(
    JsonFields& config, int head_dim);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_ROPE_CONFIG_H_
