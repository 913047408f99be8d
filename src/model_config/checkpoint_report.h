// Reports what a model folder holds, which of its tensors a server reads, and
// what problems the folder has. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_CHECKPOINT_REPORT_H_
#define WEFT_SRC_MODEL_CONFIG_CHECKPOINT_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "src/model_config/model_config.h"
#include "src/weights/tensor_types.h"

namespace weft::model_config {

// Tensors of one dtype and shape whose names differ only in the indices of
// layers and experts.
struct TensorGroup {
  std::string name;  // The tensors' name, with "*" for each number.
  weights::ScalarType dtype = weights::ScalarType::kF32;
  std::vector<int64_t> shape;
  int64_t count = 0;
  uint64_t size_bytes = 0;  // The sum over the group.
  bool is_read = false;
};

// A reason why a model cannot be served. Tensors with the same fault whose
// names differ only in numbers share a ModelProblem.
struct ModelProblem {
  std::string message;
  int64_t count = 0;
};

struct CheckpointReport {
  std::optional<ModelConfig> config;  // None if it cannot be read.
  int64_t num_files = 0;
  std::vector<TensorGroup> groups;  // Sorted by their first tensor's name.
  int64_t num_tensors = 0;
  uint64_t size_bytes = 0;
  int64_t num_read_tensors = 0;
  uint64_t read_bytes = 0;             // Bytes that a server reads.
  uint64_t head_bytes = 0;             // Bytes of head and embedding.
  std::vector<ModelProblem> problems;  // Empty if none was found.
};

// Turns "model.layers.3.mlp.up_proj.weight" into
// "model.layers.*.mlp.up_proj.weight".
std::string WithoutNumbers(absl::string_view name);

// Reads config.json, generation_config.json and the headers of the weights.
// Never fails: lists the faults as problems of the report. If the head is tied,
// does not check whether a stored head equals the embedding.
CheckpointReport InspectCheckpoint(const std::string& model_dir);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_CHECKPOINT_REPORT_H_
