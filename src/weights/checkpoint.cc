#include "src/weights/checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"
#include "src/weights/shard_index.h"
#include "src/weights/strict_json.h"

namespace weft::weights {
namespace {

constexpr size_t kMaxIndexBytes = size_t{64} << 20;

// Where families put the decoder whose canonical prefix is "model.".
constexpr absl::string_view kDecoderPrefixes[] = {
    "", "model.", "language_model.model.", "model.language_model.",
    "transformer."};
// Where they put what stands beside the decoder, such as lm_head.
constexpr absl::string_view kOuterPrefixes[] = {
    "", "model.", "language_model.", "model.language_model.", "transformer."};

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(path, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(
    const std::string& model_dir) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  const std::string single = absl::StrCat(model_dir, "/model.safetensors");
  auto file = SafetensorsFile::Open(single);
  if (file.ok()) {
    for (const auto& [name, view] : (*file)->tensors()) {
      checkpoint->tensors_.emplace(name, view);
    }
    checkpoint->files_.push_back(*std::move(file));
    return checkpoint;
  }
  if (!absl::IsNotFound(file.status())) return file.status();

  const std::string index_path = absl::StrCat(single, ".index.json");
  const auto text = ReadSmallFile(index_path, kMaxIndexBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(
        absl::StrCat("neither ", single, " nor ", index_path, " exists"));
  }
  if (!text.ok()) return text.status();
  const auto index = ParseShardIndex(*text);
  if (!index.ok()) return InFile(index_path, index.status());

  absl::flat_hash_map<std::string, const TensorMap*> shards;
  for (const auto& [tensor, file_name] : *index) {
    const std::string path = absl::StrCat(model_dir, "/", file_name);
    const TensorMap*& shard = shards[file_name];
    if (shard == nullptr) {
      WEFT_ASSIGN_OR_RETURN(auto opened, SafetensorsFile::Open(path));
      shard = &opened->tensors();
      checkpoint->files_.push_back(std::move(opened));
    }
    const auto found = shard->find(tensor);
    if (found == shard->end()) {
      return absl::DataLossError(absl::StrCat(
          path, " lacks tensor '", tensor, "', which ", index_path, " maps"));
    }
    checkpoint->tensors_.emplace(tensor, found->second);
  }
  return checkpoint;
}

absl::StatusOr<TensorView> Checkpoint::Find(
    std::string_view canonical_name) const {
  const absl::string_view name(canonical_name.data(), canonical_name.size());
  absl::string_view stem = name;
  const bool in_decoder = absl::ConsumePrefix(&stem, "model.");
  const TensorView* match = nullptr;
  std::string matched_name;
  for (const absl::string_view prefix :
       in_decoder ? kDecoderPrefixes : kOuterPrefixes) {
    std::string candidate = absl::StrCat(prefix, stem);
    const auto found = tensors_.find(candidate);
    if (found == tensors_.end()) continue;
    if (match != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name, "' could be '", matched_name, "' or '",
                       candidate, "' of the checkpoint"));
    }
    match = &found->second;
    matched_name = std::move(candidate);
  }
  if (match == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("tensor '", name, "' is not in the checkpoint"));
  }
  return *match;
}

std::vector<std::string> Checkpoint::Names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, view] : tensors_) names.push_back(name);
  std::ranges::sort(names);
  return names;
}

}  // namespace weft::weights
