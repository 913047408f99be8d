// A snapshot, where u32 and u64 are little-endian numbers and `bytes` is
// SnapshotFile::bytes:
// "WEFTSNAP" | u64 next sequence | u64 length of `bytes` |
// u32 CRC32C of `bytes` | u32 CRC32C of the fields so far | `bytes`
#include "src/log/state_format.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/base/fingerprint.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

constexpr int kFormatVersion = 5;
constexpr std::string_view kSnapshotMagic = "WEFTSNAP";
constexpr size_t kHeaderBytes = 32;

}  // namespace

std::string EncodeFormat(const std::string& model) {
  const nlohmann::json json = {{"format_version", kFormatVersion},
                               {"model", model}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<std::string> DecodeFormat(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("format_version") ||
      !json["format_version"].is_number_integer() || !json.contains("model") ||
      !json["model"].is_string()) {
    return absl::DataLossError("FORMAT of the state is damaged");
  }
  if (const auto version = json["format_version"].get<int64_t>();
      version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the state has format version ", version, "; this program knows ",
        kFormatVersion,
        ". Save checkpoints with the version that wrote it, start this one "
        "with an empty --state-dir or --state, and load them"));
  }
  return json["model"].get<std::string>();
}

absl::Status OtherModel(const std::string& stored, const std::string& model) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the state belongs to another base model than --model: ",
      FingerprintDifference(stored, model),
      ". Start with that model, or with --accept-base-model-change if the "
      "adapters are to go on with this one"));
}

std::string SnapshotHeader(uint64_t next_sequence, std::string_view bytes) {
  std::string header(kSnapshotMagic);
  AppendNumber(next_sequence, &header);
  AppendNumber(uint64_t{bytes.size()}, &header);
  AppendNumber(Crc32c(bytes), &header);
  AppendNumber(Crc32c(header), &header);
  return header;
}

absl::StatusOr<SnapshotFile> DecodeSnapshotFile(uint64_t next_sequence,
                                                std::string file,
                                                const std::string& name) {
  const std::string header = file.substr(0, kHeaderBytes);
  file.erase(0, kHeaderBytes);
  if (header != SnapshotHeader(next_sequence, file)) {
    return absl::DataLossError(absl::StrCat(name, " is damaged"));
  }
  return SnapshotFile{.next_sequence = next_sequence, .bytes = std::move(file)};
}

}  // namespace weft::log
