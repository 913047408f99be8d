// Computes the memory that a training micro-batch keeps for its backward pass,
// and how many layers must be recomputed so that it fits.
#ifndef WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_
#define WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/config/options.h"
#include "src/model_config/model_config.h"

namespace weft::engine {

// Bytes.
struct ActivationBytes {
  int64_t kept_layer = 0;        // Tape of one layer.
  int64_t recomputed_layer = 0;  // Input of one layer.
  int64_t working = 0;           // Used while one layer or the head runs.

  [[nodiscard]] int64_t Total(int num_layers, int num_recomputed) const {
    return (num_layers - num_recomputed) * kept_layer +
           num_recomputed * recomputed_layer + working;
  }
};

struct BatchRows {
  int64_t rows = 0;       // Rows of the micro-batch.
  int64_t scored = 0;     // Rows that the head scores.
  int64_t entries = 0;    // Targets of those rows.
  int64_t chunk = 0;      // Rows of a chunk of the head.
  int64_t head_rank = 0;  // Largest LoRA rank on lm_head; 0: none.
  int64_t nodes = 1;      // Nodes of prefix trees, >= sequences.
};

// `element_bytes` are the bytes of an element of the model dtype. `rank` is the
// largest LoRA rank.
[[nodiscard]] ActivationBytes ActivationsOf(const model::ModelConfig& config,
                                            int64_t element_bytes, int max_rank,
                                            const BatchRows& batch);

// Returns the fewest layers to recompute so that the batch needs at most
// `budget` bytes; 0 means no limit. The policies kAll and kOff return all
// layers and none. Errors: RESOURCE_EXHAUSTED with the needed and the available
// bytes.
[[nodiscard]] absl::StatusOr<int> ChooseRecomputed(GradientCheckpointing policy,
                                                   const ActivationBytes& bytes,
                                                   int num_layers,
                                                   int64_t budget);

// Returns half of the memory that this process could still allocate on the
// host: MemAvailable, or the rest of its control group if that is less. Returns
// 0 if both are unknown.
[[nodiscard]] int64_t DefaultHostBudget();

}  // namespace weft::engine

#endif  // WEFT_SRC_TRAIN_ACTIVATION_BUDGET_H_
