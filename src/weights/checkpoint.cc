#include "src/weights/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/safetensors.h"
#include "src/weights/strict_json.h"
#include "src/weights/tensor_types.h"
#include "src/weights/torch_bin.h"

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

constexpr size_t kMaxIndexBytes = size_t{64} << 20;

// Prefixes that files use for names in the decoder. The canonical prefix
// is "model.".
constexpr absl::string_view kDecoderPrefixes[] = {"",
                                                  "model.",
                                                  "language_model.",
                                                  "language_model.model.",
                                                  "model.language_model.",
                                                  "transformer."};
// Prefixes that files use for names outside the decoder, such as lm_head.
constexpr absl::string_view kOuterPrefixes[] = {
    "", "model.", "language_model.", "model.language_model.", "transformer."};

// The formats of checkpoints, in the order in which transformers prefers them.
struct Format {
  absl::string_view file_name;
  DirectoryReader read_directory;
};
constexpr Format kFormats[] = {{"model.safetensors", ReadSafetensorsDirectory},
                               {"pytorch_model.bin", ReadTorchDirectory}};

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

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(
    const std::string& model_dir) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  std::vector<std::string> tried;
  for (const Format& format : kFormats) {
    const std::string single = absl::StrCat(model_dir, "/", format.file_name);
    auto file = TensorFile::Open(single, format.read_directory);
    if (file.ok()) {
      for (const auto& entry : (*file)->tensors()) {
        checkpoint->tensors_.emplace(entry.first, DiskTensor(**file, entry));
      }
      checkpoint->files_.push_back(*std::move(file));
      return checkpoint;
    }
    if (!absl::IsNotFound(file.status())) return file.status();

    const std::string index_path = absl::StrCat(single, ".index.json");
    const auto index = ReadSmallFile(index_path, kMaxIndexBytes);
    if (absl::IsNotFound(index.status())) {
      tried.insert(tried.end(), {single, index_path});
      continue;
    }
    if (!index.ok()) return index.status();
    WEFT_RETURN_IF_ERROR(checkpoint->OpenShards(model_dir, index_path, *index,
                                                format.read_directory));
    return checkpoint;
  }
  return absl::NotFoundError(
      absl::StrCat("none of ", absl::StrJoin(tried, ", "), " exists"));
}

absl::Status Checkpoint::OpenShards(const std::string& model_dir,
                                    const std::string& index_path,
                                    absl::string_view index_text,
                                    DirectoryReader read_directory) {
  const auto index = ParseShardIndex(index_text);
  if (!index.ok()) return InFile(index_path, index.status());

  absl::flat_hash_map<std::string, const TensorFile*> shards;
  size_t num_stored = 0;
  for (const auto& [tensor, file_name] : *index) {
    const TensorFile*& shard = shards[file_name];
    if (shard == nullptr) {
      WEFT_ASSIGN_OR_RETURN(
          auto opened, TensorFile::Open(absl::StrCat(model_dir, "/", file_name),
                                        read_directory));
      num_stored += opened->tensors().size();
      if (num_stored > kMaxTensors) {
        return absl::InvalidArgumentError(
            absl::StrCat(index_path, " maps into files of more than ",
                         kMaxTensors, " tensors in all"));
      }
      shard = opened.get();
      files_.push_back(std::move(opened));
    }
    const auto found = shard->tensors().find(tensor);
    if (found == shard->tensors().end()) {
      return absl::DataLossError(absl::StrCat(shard->path(), " lacks ",
                                              QuotedTensor(tensor), ", which ",
                                              index_path, " maps"));
    }
    tensors_.emplace(tensor, DiskTensor(*shard, *found));
  }
  return absl::OkStatus();
}

absl::StatusOr<DiskTensor> Checkpoint::Find(
    std::string_view canonical_name) const {
  const absl::string_view name(canonical_name.data(), canonical_name.size());
  absl::string_view stem = name;
  const bool in_decoder = absl::ConsumePrefix(&stem, "model.");
  const DiskTensor* match = nullptr;
  std::string matched_name;
  for (const absl::string_view prefix :
       in_decoder ? absl::MakeConstSpan(kDecoderPrefixes)
                  : absl::MakeConstSpan(kOuterPrefixes)) {
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

std::string Checkpoint::LayerTensorName(absl::string_view name) {
  for (const absl::string_view prefix : kDecoderPrefixes) {
    absl::string_view rest = name;
    if (absl::ConsumePrefix(&rest, prefix) &&
        absl::StartsWith(rest, "layers.")) {
      return absl::StrCat("model.", rest);
    }
  }
  return "";
}

std::vector<DiskTensor> Checkpoint::Tensors() const {
  std::vector<DiskTensor> tensors;
  tensors.reserve(tensors_.size());
  for (const auto& [name, tensor] : tensors_) tensors.push_back(tensor);
  std::ranges::sort(tensors, {}, &DiskTensor::name);
  return tensors;
}

uint64_t Checkpoint::bytes_read() const {
  uint64_t bytes = 0;
  for (const auto& file : files_) bytes += file->file().bytes_read();
  return bytes;
}

}  // namespace weft::weights
