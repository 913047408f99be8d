#include "client/peft_folder.h"

#include <array>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace weft::client {
namespace {

namespace fs = std::filesystem;

constexpr std::array<const char*, 2> kFiles = {"adapter_config.json",
                                               "adapter_model.safetensors"};
constexpr char kOptimizerFile[] = "optimizer.safetensors";
constexpr char kStateFile[] = "trainer_state.json";
constexpr size_t kChunkBytes = size_t{1} << 20;

fs::path ScratchBeside(const fs::path& folder) {
  const fs::path absolute = fs::absolute(folder).lexically_normal();
  return absolute.parent_path() /
         absl::StrCat(".weft-export-", absl::Hex(std::random_device{}()));
}

absl::Status DiskError(const std::string& what, const fs::path& path) {
  return absl::InternalError(absl::StrCat("cannot ", what, " ", path.string()));
}

absl::Status ReadFiles(const fs::path& folder,
                       const std::vector<std::string>& names,
                       const std::function<bool(const v1::FileChunk&)>& send) {
  for (const std::string& name : names) {
    if (fs::is_regular_file(folder / name)) continue;
    const bool has_pickle =
        name == kFiles[1] && fs::is_regular_file(folder / "adapter_model.bin");
    return absl::NotFoundError(absl::StrCat(
        "no ", name, " in ", folder.string(),
        has_pickle
            ? "; adapter_model.bin is not read, because a pickle can run "
              "code: save the adapter again with safe_serialization=True"
            : ""));
  }
  std::string buffer(kChunkBytes, '\0');
  for (const std::string& name : names) {
    std::ifstream file(folder / name, std::ios::binary);
    if (!file) return DiskError("read", folder / name);
    v1::FileChunk chunk;
    chunk.set_name(name);
    // Sends an empty file as one empty chunk, so that the server gets its name.
    do {
      file.read(buffer.data(), kChunkBytes);
      chunk.set_data(buffer.data(), static_cast<size_t>(file.gcount()));
      if (!send(chunk)) return absl::OkStatus();
    } while (file.peek() != std::ifstream::traits_type::eof());
    if (file.bad()) return DiskError("read", folder / name);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadPeftFolder(
    const fs::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send) {
  return ReadFiles(folder, {kFiles.begin(), kFiles.end()}, send);
}

absl::Status ReadCheckpointFolder(
    const fs::path& folder,
    const std::function<bool(const v1::FileChunk&)>& send) {
  std::vector<std::string> names(kFiles.begin(), kFiles.end());
  names.emplace_back(kStateFile);
  if (fs::is_regular_file(folder / kOptimizerFile)) {
    names.emplace_back(kOptimizerFile);
  }
  return ReadFiles(folder, names, send);
}

PeftFolderWriter::PeftFolderWriter(fs::path folder)
    : folder_(std::move(folder)), scratch_(ScratchBeside(folder_)) {}

PeftFolderWriter::~PeftFolderWriter() {
  file_.close();
  std::error_code ignored;
  fs::remove_all(scratch_, ignored);
}

absl::Status PeftFolderWriter::Add(const v1::FileChunk& chunk) {
  if (!file_.is_open() || chunk.name() != name_) {
    const fs::path name = chunk.name();
    if (name.empty() || name != name.filename() || chunk.name() == "." ||
        chunk.name() == "..") {
      return absl::DataLossError(
          absl::StrCat("the server sent the file name '", chunk.name(), "'"));
    }
    std::error_code error;
    fs::create_directories(scratch_, error);
    file_.close();
    file_.open(scratch_ / name, std::ios::binary | std::ios::trunc);
    name_ = chunk.name();
  }
  file_.write(chunk.data().data(),
              static_cast<std::streamsize>(chunk.data().size()));
  if (!file_) return DiskError("write", scratch_ / name_);
  return absl::OkStatus();
}

absl::Status PeftFolderWriter::Commit() {
  // Closing a stream that was never opened would set its fail bit.
  if (file_.is_open()) file_.close();
  if (file_.fail()) return DiskError("write", scratch_ / name_);
  for (const char* name : kFiles) {
    if (!fs::exists(scratch_ / name)) {
      return absl::DataLossError(
          absl::StrCat("the server's export has no ", name));
    }
  }
  std::error_code error;
  fs::create_directories(folder_, error);
  for (const auto& entry : fs::directory_iterator(scratch_)) {
    fs::rename(entry.path(), folder_ / entry.path().filename(), error);
    if (error) return DiskError("write", folder_ / entry.path().filename());
  }
  return absl::OkStatus();
}

}  // namespace weft::client
