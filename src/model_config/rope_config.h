// Computes rotary frequencies from the fields of config.json. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_

#include <vector>

#include "absl/status/statusor.h"
#include "src/model_config/family_config.h"
#include "src/model_config/json_fields.h"

namespace weft::model {

struct RopeTable {
  std::vector<double> frequencies;  // [head_dim / 2], with scaling applied.
  // YaRN multiplies queries and keys by a factor. This is its square, by which
  // their products grow.
  double score_factor = 1;
};

// Reads rope_parameters, or rope_theta with rope_scaling and
// rope_local_base_freq, in the spellings of all releases of transformers.
// Knows the scalings default, linear, llama3, yarn and dynamic. There is one
// table, or two (full layers, sliding layers) for a family whose sliding layers
// have their own. Dynamic scaling changes nothing, because it applies only
// beyond max_position_embeddings, the longest context. Errors: UNIMPLEMENTED
// for another kind of scaling or another field; INVALID_ARGUMENT for values out
// of range or spellings that disagree. Source: Su et al. 2021 (theta^(-2i/d));
// Llama 3.1's piecewise scaling; Peng et al. 2023 (YaRN).
[[nodiscard]] absl::StatusOr<std::vector<RopeTable>> ReadRopeTables(
    JsonFields& config, const Family& family, int head_dim);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_ROPE_CONFIG_H_
