#include "server/call/tokenizer_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr const char* kNames[] = {
    "added_tokens.json",       "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",     "generation_config.json",
    "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json"};

constexpr int64_t kMaxFileBytes = int64_t{256} << 20;

// Follows links: the files of a Hugging Face cache are links.
absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  // With O_NONBLOCK, opening a FIFO of this name does not block.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) {
    return ErrnoStatus(errno, "opening " + path);
  }
  if (info.st_size > kMaxFileBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " has ", info.st_size, " bytes, must have at most 256 MiB"));
  }
  std::string bytes(static_cast<size_t>(info.st_size), '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t read, ReadAt(file.get(), 0, bytes, path));
  bytes.resize(read);
  return bytes;
}

}  // namespace

TokenizerFiles TokenizerFiles::Load(const std::string& model_dir) {
  TokenizerFiles loaded;
  Sha256Sum sum;
  bool complete = false;
  for (const std::string name : kNames) {
    absl::StatusOr<std::string> bytes =
        ReadWhole(absl::StrCat(model_dir, "/", name));
    if (absl::IsNotFound(bytes.status())) continue;
    if (!bytes.ok()) {
      Log(LogLevel::kWarning, "clients get no tokenizer",
          {{"reason", bytes.status().message()}});
      return {};
    }
    complete |= name == "tokenizer.json";
    for (const std::string& part : {name, absl::StrCat(bytes->size())}) {
      sum.Add(part);
      sum.Add(std::string(1, '\0'));
    }
    sum.Add(*bytes);
    loaded.files.emplace_back(name, *std::move(bytes));
  }
  if (!complete) return {};
  loaded.fingerprint = absl::BytesToHexString(sum.Finish());
  return loaded;
}

}  // namespace weft::server
