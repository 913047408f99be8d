#include "src/weights/shard_index.h"

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/weights/strict_json.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {
namespace {

constexpr JsonLimits kIndexLimits = {.max_bytes = size_t{64} << 20,
                                     .max_depth = 4};
constexpr size_t kMaxFileNameBytes = 255;

// Returns whether `name` can name a file directly in the index's folder.
bool IsBareFileName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxFileNameBytes) return false;
  if (name == "." || name == "..") return false;
  for (const char c : name) {
    if (c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20) {
      return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view json) {
  WEFT_ASSIGN_OR_RETURN(const nlohmann::json root,
                        ParseStrictJson(json, "shard index", kIndexLimits));
  const auto map = root.find("weight_map");
  if (map == root.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        "shard index has no weight_map with tensors");
  }
  if (map->size() > kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weight_map has ", map->size(), " tensors > limit ", kMaxTensors));
  }
  ShardIndex index;
  for (const auto& [tensor, file] : map->items()) {
    const auto* name = file.get_ptr<const std::string*>();
    if (name == nullptr || !IsBareFileName(*name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "weight_map puts tensor '", absl::CHexEscape(tensor), "' into ",
          name == nullptr ? "something that is not a string"
                          : absl::StrCat("'", absl::CHexEscape(*name), "'"),
          "; a bare file name is expected"));
    }
    index.emplace(tensor, *name);
  }
  return index;
}

}  // namespace weft::weights
