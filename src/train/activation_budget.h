// How much memory a training micro-batch keeps for its backward pass, and how
// many layers must be recomputed so that it fits.
#ifndef WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_
#define WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/config/options.h"
#include "src/model_config/model_config.h"

namespace weft::engine {

// Bytes.
struct ActivationBytes {
  int64_t kept_layer = 0;        // One layer's tape.
  int64_t recomputed_layer = 0;  // Its input alone.
  int64_t working = 0;           // Alive while one layer or the head runs.

  [[nodiscard]] int64_t Total(int num_layers, int num_recomputed) const {
    return (num_layers - num_recomputed) * kept_layer +
           num_recomputed * recomputed_layer + working;
  }
};

struct BatchRows {
  int64_t rows = 0;       // Rows of the micro-batch.
  int64_t scored = 0;     // Those that the head scores.
  int64_t entries = 0;    // Their targets.
  int64_t chunk = 0;      // Rows of a chunk of the head.
  int64_t head_rank = 0;  // Largest of those that train lm_head; 0: none.
  int64_t nodes = 1;      // Nodes of its prefix trees: sequences, at least.
};

// Arguments: bytes of an element of the model dtype; the largest rank.
[[nodiscard]] ActivationBytes ActivationsOf(const model::ModelConfig& config,
                                            int64_t element_bytes, int max_rank,
                                            const BatchRows& batch);

// The fewest layers to recompute within `budget` bytes (0: no limit); all or
// none for the policies that say so.
// Errors: RESOURCE_EXHAUSTED with the bytes needed and those there are.
[[nodiscard]] absl::StatusOr<int> ChooseRecomputed(GradientCheckpointing policy,
                                                   const ActivationBytes& bytes,
                                                   int num_layers,
                                                   int64_t budget);

// Half of what this process could still allocate on the host: MemAvailable, or
// what its control group leaves if that is less. 0 when it cannot be told.
[[nodiscard]] int64_t DefaultHostBudget();

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_
