// A Hugging Face checkpoint on disk. Its format is safetensors or torch's .bin,
// in one file or in shards with an index. Torch-free. Reads tensors on request.
#ifndef WEFT_SRC_WEIGHTS_CHECKPOINT_H_
#define WEFT_SRC_WEIGHTS_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/weights/tensor_file.h"

namespace weft::weights {

// Threads: any, once opened. The Checkpoint outlives its tensors.
class Checkpoint {
 public:
  // Opens the first of these that exists: model.safetensors, the files of
  // model.safetensors.index.json, pytorch_model.bin, the files of
  // pytorch_model.bin.index.json. Reads and checks headers, not tensors.
  // Errors: NOT_FOUND, which names the missing files; those of
  // TensorFile::Open, ReadSmallFile and ParseShardIndex; DATA_LOSS if a shard
  // lacks a tensor of the index. A damaged file is an error, even if a file
  // later in the list exists.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(
      const std::string& model_dir);

  // Finds a tensor by Hugging Face's canonical name, such as
  // "model.embed_tokens.weight" or "lm_head.weight". Tries the prefixes that
  // files use: none, "model.", "language_model.", "transformer." and others.
  // Errors: NOT_FOUND, which names the tensor; INVALID_ARGUMENT if two tensors
  // match.
  absl::StatusOr<DiskTensor> Find(std::string_view name) const;

  // Returns all tensors, ordered by their names in the files.
  std::vector<DiskTensor> Tensors() const;
  const std::vector<std::unique_ptr<TensorFile>>& files() const {
    return files_;
  }

  // Returns the canonical name of a tensor in the decoder's layers, such as
  // "model.layers.0.mlp.up_proj.weight". `name` may have any prefix of the
  // decoder. Returns an empty string for other tensors.
  static std::string LayerTensorName(absl::string_view name);

  // Returns the number of bytes read from all tensor files since they were
  // opened, headers included.
  uint64_t bytes_read() const;

 private:
  Checkpoint() = default;
  absl::Status OpenShards(const std::string& model_dir,
                          const std::string& index_path,
                          absl::string_view index_text,
                          DirectoryReader read_directory);

  std::vector<std::unique_ptr<TensorFile>> files_;
  absl::flat_hash_map<std::string, DiskTensor> tensors_;
};

// Maps a tensor's name to the name of a file in the folder of the index, which
// is model.safetensors.index.json or pytorch_model.bin.index.json.
using ShardIndex = absl::btree_map<std::string, std::string>;

// Parses the text of an index. Errors: INVALID_ARGUMENT, which names the rule
// and, if there is one, the tensor.
absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view json);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_CHECKPOINT_H_
