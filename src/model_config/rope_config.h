// Computes rotary frequencies from the fields of config.json. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_

#include <vector>

#include "absl/status/statusor.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"

namespace weft::model {

// Reads rope_parameters, or rope_theta with rope_scaling and
// rope_local_base_freq, in the spellings of all releases of transformers.
// Returns tables of [head_dim / 2] with the scaling (default, linear, llama3,
// dynamic) applied. There is one table, or two (full layers, sliding layers)
// for a family whose sliding layers have their own. Dynamic scaling changes
// nothing, because it applies only beyond max_position_embeddings, the longest
// context. Errors: UNIMPLEMENTED for another kind of scaling or another field;
// INVALID_ARGUMENT for values out of range or spellings that disagree. Source:
// Su et al. 2021 (theta^(-2i/d)); Llama 3.1's piecewise scaling.
[[nodiscard]] absl::StatusOr<std::vector<std::vector<double>>> ReadRopeTables(
    JsonFields& config, const Family& family, int head_dim);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
