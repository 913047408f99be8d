// A Hugging Face checkpoint on disk: one safetensors file or shards with an
// index. Torch-free; tensors are views into memory-mapped files.
#ifndef WEFT_SRC_WEIGHTS_CHECKPOINT_H_
#define WEFT_SRC_WEIGHTS_CHECKPOINT_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "src/weights/safetensors.h"

namespace weft::weights {

// Threads: any, once opened. Views stay valid while the Checkpoint lives.
class Checkpoint {
 public:
  // Opens model.safetensors, or the files of model.safetensors.index.json.
  // Headers are read and checked, tensor bytes are not. NOT_FOUND names the
  // missing file; DATA_LOSS or INVALID_ARGUMENT names file, tensor and rule.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(
      const std::string& model_dir);

  // Finds a tensor by Hugging Face's canonical name such as
  // "model.embed_tokens.weight" or "lm_head.weight", whatever prefix the file
  // uses (bare, "model.", "language_model.model.", "model.language_model.",
  // "transformer."). NOT_FOUND names it; INVALID_ARGUMENT when two match.
  [[nodiscard]] absl::StatusOr<TensorView> Find(std::string_view name) const;

  // Names as in the files, ordered.
  [[nodiscard]] std::vector<std::string> Names() const;

 private:
  Checkpoint() = default;

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  absl::flat_hash_map<std::string, TensorView> tensors_;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_CHECKPOINT_H_
