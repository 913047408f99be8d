// Reads model.safetensors.index.json or pytorch_model.bin.index.json, which map
// each tensor to the file that holds it. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_SHARD_INDEX_H_
#define WEFT_SRC_WEIGHTS_SHARD_INDEX_H_

#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::weights {

// Maps a tensor's name to the name of a file in the folder of the index.
using ShardIndex = absl::btree_map<std::string, std::string>;

// Parses the text of an index. Errors: INVALID_ARGUMENT, which names the rule
// and, if there is one, the tensor.
[[nodiscard]] absl::StatusOr<ShardIndex> ParseShardIndex(
    absl::string_view json);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_SHARD_INDEX_H_
