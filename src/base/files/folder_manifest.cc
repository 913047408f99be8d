#include "src/base/files/folder_manifest.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

constexpr int kManifestVersion = 1;

std::optional<FolderManifest::File> ParseFile(const nlohmann::json& json) {
  if (!json.is_object()) return std::nullopt;
  const auto name = json.find("name");
  const auto size = json.find("size");
  const auto sha256 = json.find("sha256");
  if (name == json.end() || !name->is_string() || size == json.end() ||
      !size->is_number_unsigned() || sha256 == json.end() ||
      !sha256->is_string()) {
    return std::nullopt;
  }
  return FolderManifest::File{.name = name->get<std::string>(),
                              .size = size->get<uint64_t>(),
                              .sha256 = sha256->get<std::string>()};
}

absl::Status CheckSize(const FileSource& file, const std::string& folder,
                       const FolderManifest::File& expected) {
  if (file.size() == expected.size) return absl::OkStatus();
  return DamagedFile(
      folder, expected.name,
      absl::StrCat("has ", file.size(), " bytes, not ", expected.size));
}

// Reads exactly `count` bytes of a file.
absl::StatusOr<std::string> ReadPart(const FileSource& file,
                                     const std::string& folder, uint64_t offset,
                                     uint64_t count) {
  absl::StatusOr<std::string> part = file.Read(offset, count);
  if (absl::IsUnavailable(part.status()) ||
      absl::IsDeadlineExceeded(part.status())) {
    return part;  // The store is away.
  }
  if (!part.ok()) {
    return DamagedFile(
        folder, file.name(),
        absl::StrCat("cannot be read: ", part.status().message()));
  }
  if (part->size() < count) {
    return DamagedFile(folder, file.name(), "has become shorter");
  }
  return part;
}

absl::Status CheckSum(Sha256Sum* sum, const std::string& folder,
                      const FolderManifest::File& expected) {
  if (absl::BytesToHexString(sum->Finish()) == expected.sha256) {
    return absl::OkStatus();
  }
  return DamagedFile(folder, expected.name, "has another SHA-256");
}

// The sum of the reads that have followed one another from the first byte on.
class SumOfReads {
 public:
  // Adds what was read. Checks the sum at the file's end.
  absl::Status Add(uint64_t offset, const std::string& part,
                   const std::string& folder,
                   const FolderManifest::File& expected) {
    if (offset == 0) {
      sum_.emplace();
      next_ = 0;
    }
    if (!sum_ || offset != next_) return absl::OkStatus();
    sum_->Add(part);
    next_ += part.size();
    if (next_ < expected.size) return absl::OkStatus();
    return CheckSum(&*sum_, folder, expected);
  }

 private:
  std::optional<Sha256Sum> sum_;
  uint64_t next_ = 0;
};

}  // namespace

FolderManifest::File DescribeFile(const std::string& name,
                                  const std::string& contents) {
  return {.name = name,
          .size = contents.size(),
          .sha256 = absl::BytesToHexString(Sha256(contents))};
}

std::string EncodeManifest(const FolderManifest& manifest) {
  nlohmann::json files = nlohmann::json::array();
  for (const FolderManifest::File& file : manifest.files) {
    files.push_back(
        {{"name", file.name}, {"size", file.size}, {"sha256", file.sha256}});
  }
  nlohmann::json json = {{"format_version", kManifestVersion},
                         {"fields", manifest.fields},
                         {"files", std::move(files)}};
  if (!manifest.place.empty()) {
    json["place"] = manifest.place;
    json["epoch"] = manifest.epoch;
    if (manifest.log != 0) json["log"] = manifest.log;
  }
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::optional<FolderManifest> ParseManifest(const std::string& text) {
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("files") ||
      !json["files"].is_array() || !json.contains("fields") ||
      json.value("format_version", nlohmann::json()) != kManifestVersion) {
    return std::nullopt;
  }
  FolderManifest manifest;
  for (const nlohmann::json& entry : json["files"]) {
    std::optional<FolderManifest::File> file = ParseFile(entry);
    if (!file) return std::nullopt;
    manifest.files.push_back(*std::move(file));
  }
  manifest.fields = std::move(json["fields"]);
  if (json.contains("place")) {
    if (!json["place"].is_string() || !json.contains("epoch") ||
        !json["epoch"].is_number_unsigned() ||
        (json.contains("log") && !json["log"].is_number_unsigned())) {
      return std::nullopt;
    }
    manifest.place = json["place"].get<std::string>();
    manifest.log = json.value("log", uint64_t{0});
    manifest.epoch = json["epoch"].get<uint64_t>();
  }
  return manifest;
}

absl::Status DamagedFile(const std::string& folder, const std::string& file,
                         const std::string& how) {
  return absl::DataLossError(
      absl::StrCat(file, " of folder \"", folder, "\" ", how));
}

absl::Status CheckFile(const FileSource& file, const std::string& folder,
                       const FolderManifest::File& expected,
                       uint64_t piece_bytes,
                       const std::function<void(std::string)>& use) {
  WEFT_RETURN_IF_ERROR(CheckSize(file, folder, expected));
  Sha256Sum sum;
  for (uint64_t offset = 0; offset < file.size(); offset += piece_bytes) {
    const uint64_t count = std::min(piece_bytes, file.size() - offset);
    WEFT_ASSIGN_OR_RETURN(std::string piece,
                          ReadPart(file, folder, offset, count));
    sum.Add(piece);
    use(std::move(piece));
  }
  return CheckSum(&sum, folder, expected);
}

absl::StatusOr<FileSource> CheckWhileRead(
    const FileSource& file, const std::string& folder,
    const FolderManifest::File& expected) {
  WEFT_RETURN_IF_ERROR(CheckSize(file, folder, expected));
  const auto read =
      [file, folder, expected, sum = std::make_shared<SumOfReads>()](
          uint64_t offset, uint64_t count) -> absl::StatusOr<std::string> {
    WEFT_ASSIGN_OR_RETURN(std::string part,
                          ReadPart(file, folder, offset, count));
    WEFT_RETURN_IF_ERROR(sum->Add(offset, part, folder, expected));
    return part;
  };
  return FileSource(expected.name, expected.size, read);
}

}  // namespace weft
