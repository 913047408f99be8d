#include "src/request/checkpoint.h"

namespace weft {

const char* CheckpointKindName(CheckpointKind kind) {
  return kind == CheckpointKind::kSampler ? "sampler" : "train";
}

size_t MetadataBytes(const CheckpointMetadata& metadata) {
  size_t bytes = 0;
  for (const auto& [key, value] : metadata) bytes += key.size() + value.size();
  return bytes;
}

}  // namespace weft
