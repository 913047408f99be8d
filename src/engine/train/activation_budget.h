// Computes the memory that a training micro-batch needs. Chooses how many
// layers the backward pass recomputes, so that the micro-batch fits.
#ifndef WEFT_SRC_ENGINE_TRAIN_ACTIVATION_BUDGET_H_
#define WEFT_SRC_ENGINE_TRAIN_ACTIVATION_BUDGET_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "src/base/options/options.h"
#include "src/model_config/model_config.h"

namespace weft::engine {

inline constexpr int64_t kFloatBytes = 4;

// The parts of a micro-batch's memory, in bytes.
struct ActivationBytes {
  // Tensors kept for a layer's backward pass: of the largest layer, if the
  // model has two kinds.
  int64_t kept_layer = 0;
  int64_t recomputed_layer = 0;  // Only the layer's input is kept.
  int64_t working = 0;           // Used while one layer or the head runs.
  int64_t forward = 0;           // All that a batch without backward needs.

  int64_t Total(int num_layers, int num_recomputed) const {
    return (num_layers - num_recomputed) * kept_layer +
           num_recomputed * recomputed_layer + working;
  }
};

struct BatchRows {
  int64_t rows = 0;       // Rows of the micro-batch.
  int64_t scored = 0;     // Rows that the head scores.
  int64_t entries = 0;    // Targets of the scored rows.
  int64_t compared = 0;   // Scored rows that are compared with a teacher's.
  int64_t chunk = 0;      // The most rows whose logits exist at once.
  int64_t head_rank = 0;  // Largest LoRA rank on lm_head; 0: none.
  // Ids of a chunk's supports, if each row has as many as the row with most.
  int64_t support_ids = 0;
  int64_t nodes = 1;  // Nodes of the prefix trees (prefix_tree.h).
};

// Returns the memory of a micro-batch on a CPU or on CUDA. `element_bytes` is
// the size of an element of activations. `max_rank` is the largest LoRA rank.
ActivationBytes ActivationsOf(const model_config::ModelConfig& config,
                              int64_t element_bytes, bool is_cpu, int max_rank,
                              const BatchRows& batch);

// Returns the fewest layers to recompute so that the batch needs at most
// `budget` bytes. A budget of 0 is no limit. The policy kAll permits only
// `num_layers`, and kOff only 0. Errors: RESOURCE_EXHAUSTED, with the needed
// and the available bytes, if the batch needs more with every permitted number.
absl::StatusOr<int> ChooseRecomputed(GradientCheckpointing policy,
                                     const ActivationBytes& bytes,
                                     int num_layers, int64_t budget);

// Half of the host's free memory.
struct HostBudget {
  int64_t bytes = 0;   // 0: unknown.
  std::string source;  // The file or control group that limits it.
};
// Returns half of MemAvailable, or of what the process's control groups leave
// if that is less (src/base/cgroup.h).
HostBudget DefaultHostBudget();

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_ACTIVATION_BUDGET_H_
