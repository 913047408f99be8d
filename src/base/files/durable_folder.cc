#include "src/base/files/durable_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/files/folder_manifest.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

// Returns a name that no other temporary folder of this process has. If an
// earlier process has left a folder of this name, mkdir fails with EEXIST, and
// Temporary::Create takes the next name.
std::string TemporaryName() {
  static std::atomic<uint64_t> counter{0};
  return absl::StrCat(kTemporaryPrefix, ::getpid(), "-", counter.fetch_add(1));
}

absl::Status CheckName(const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  if (absl::StartsWith(name, kTemporaryPrefix)) {
    return absl::InvalidArgumentError(
        absl::StrCat("names with ", kTemporaryPrefix, " are reserved"));
  }
  return absl::OkStatus();
}

void RemoveTree(const std::string& parent, const std::string& name) {
  // If the removal fails, RemoveStaleTemporaries tries again at the next start.
  std::error_code ignored;
  std::filesystem::remove_all(std::filesystem::path(parent) / name, ignored);
}

// Owns a folder with a temporary name. The destructor removes whatever folder
// then has this name, unless Keep was called.
class Temporary {
 public:
  static absl::StatusOr<Temporary> Create(const std::string& parent,
                                          int parent_fd) {
    for (;;) {
      std::string name = TemporaryName();
      if (!Failpoint("files.make_folder") &&
          ::mkdirat(parent_fd, name.c_str(), 0700) == 0) {
        return Temporary(parent, std::move(name));
      }
      if (errno != EEXIST) return ErrnoStatus(errno, "creating a folder");
    }
  }
  Temporary(Temporary&& other) noexcept
      : parent_(std::move(other.parent_)),
        name_(std::exchange(other.name_, "")) {}
  Temporary& operator=(Temporary&&) = delete;
  ~Temporary() {
    if (!name_.empty()) RemoveTree(parent_, name_);
  }

  const std::string& name() const { return name_; }
  void Keep() { name_.clear(); }

 private:
  Temporary(std::string parent, std::string name)
      : parent_(std::move(parent)), name_(std::move(name)) {}

  std::string parent_;
  std::string name_;
};

absl::Status WriteContents(int dir, const DurableFolder& folder) {
  FolderManifest manifest{.fields = folder.fields};
  for (const auto& [name, contents] : folder.files) {
    if (name == kManifestFile) {
      return absl::InvalidArgumentError("MANIFEST.json is a reserved name");
    }
    WEFT_RETURN_IF_ERROR(WriteFileAt(dir, name, contents));
    manifest.files.push_back(DescribeFile(name, contents));
  }
  WEFT_RETURN_IF_ERROR(
      WriteFileAt(dir, kManifestFile, EncodeManifest(manifest)));
  return SyncDirectory(dir, "the folder");
}

// Renames the temporary folder to `name`. With `overwrite`, an existing folder
// `name` gets the temporary name in the same step. The destructor of
// `temporary` then removes that old folder.
absl::Status Publish(int parent_fd, const std::string& name, bool overwrite,
                     Temporary& temporary) {
  const char* from = temporary.name().c_str();
  if (overwrite) {
    if (!Failpoint("files.exchange") &&
        ::renameat2(parent_fd, from, parent_fd, name.c_str(),
                    RENAME_EXCHANGE) == 0) {
      return absl::OkStatus();
    }
    if (errno != ENOENT) return ErrnoStatus(errno, "replacing " + name);
  }
  if (Failpoint("files.rename") ||
      ::renameat2(parent_fd, from, parent_fd, name.c_str(), RENAME_NOREPLACE) !=
          0) {
    if (errno == EEXIST) {
      return absl::AlreadyExistsError(
          absl::StrCat("\"", name, "\" exists already"));
    }
    return ErrnoStatus(errno, "publishing " + name);
  }
  temporary.Keep();
  return absl::OkStatus();
}

// Opens the parent of a folder. It may not be a symbolic link itself: the link
// could lead to another tenant's folders.
absl::StatusOr<UniqueFd> OpenParent(const std::string& parent) {
  const std::filesystem::path path(parent);
  const std::string above = path.parent_path().string();
  WEFT_ASSIGN_OR_RETURN(
      const UniqueFd fd,
      OpenDirectory(above.empty() ? "." : above, "the parent"));
  return OpenDirectoryAt(fd.get(), path.filename().string());
}

absl::StatusOr<UniqueFd> OpenFolder(const std::string& parent,
                                    const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckName(name));
  absl::StatusOr<UniqueFd> parent_fd = OpenParent(parent);
  absl::StatusOr<UniqueFd> dir = parent_fd.ok()
                                     ? OpenDirectoryAt(parent_fd->get(), name)
                                     : parent_fd.status();
  if (dir.ok()) return dir;
  std::error_code ignored;
  if (absl::IsNotFound(dir.status()) ||
      std::filesystem::is_symlink(parent, ignored) ||
      std::filesystem::is_symlink(std::filesystem::path(parent) / name,
                                  ignored)) {
    return absl::NotFoundError(absl::StrCat("\"", name, "\" does not exist"));
  }
  return dir;
}

absl::StatusOr<FolderManifest> ReadManifest(int dir,
                                            const std::string& folder) {
  absl::StatusOr<std::string> text = ReadFileAt(dir, kManifestFile);
  if (absl::IsNotFound(text.status())) {
    return DamagedFile(folder, kManifestFile, "is missing");
  }
  if (!text.ok()) return text.status();
  std::optional<FolderManifest> manifest = ParseManifest(*text);
  if (!manifest) return DamagedFile(folder, kManifestFile, "is damaged");
  return *std::move(manifest);
}

absl::StatusOr<FileSource> OpenFile(int dir, const std::string& folder,
                                    const std::string& name) {
  absl::StatusOr<FileSource> file = FileSource::OpenAt(dir, name);
  if (file.ok()) return file;
  return DamagedFile(folder, name,
                     absl::StrCat("cannot be read: ", file.status().message()));
}

// A replaced file has another inode, unless it is the second in one tick of the
// file system's clock.
std::string VersionOf(const struct stat& file) {
  return absl::StrCat(file.st_ino, ".", file.st_size, ".", file.st_ctim.tv_sec,
                      ".", file.st_ctim.tv_nsec);
}

}  // namespace

absl::Status WriteDurableFolder(const std::string& parent,
                                const std::string& name,
                                const DurableFolder& folder, bool overwrite) {
  WEFT_RETURN_IF_ERROR(CheckName(name));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd parent_fd, OpenParent(parent));
  WEFT_ASSIGN_OR_RETURN(Temporary temporary,
                        Temporary::Create(parent, parent_fd.get()));
  {
    WEFT_ASSIGN_OR_RETURN(const UniqueFd dir,
                          OpenDirectoryAt(parent_fd.get(), temporary.name()));
    WEFT_RETURN_IF_ERROR(WriteContents(dir.get(), folder));
  }
  WEFT_RETURN_IF_ERROR(Publish(parent_fd.get(), name, overwrite, temporary));
  return SyncDirectory(parent_fd.get(), "the parent of " + name);
}

absl::StatusOr<DurableFolder> ReadDurableFolder(const std::string& parent,
                                                const std::string& name) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenFolder(parent, name));
  WEFT_ASSIGN_OR_RETURN(FolderManifest manifest, ReadManifest(dir.get(), name));
  DurableFolder folder;
  folder.fields = std::move(manifest.fields);
  for (const FolderManifest::File& file : manifest.files) {
    std::string contents;
    const auto keep = [&contents](std::string all) {
      contents = std::move(all);
    };
    WEFT_ASSIGN_OR_RETURN(const FileSource opened,
                          OpenFile(dir.get(), name, file.name));
    WEFT_RETURN_IF_ERROR(CheckFile(opened, name, file, file.size, keep));
    folder.files.emplace_back(file.name, std::move(contents));
  }
  return folder;
}

absl::StatusOr<OpenedFolder> OpenDurableFolder(const std::string& parent,
                                               const std::string& name) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenFolder(parent, name));
  WEFT_ASSIGN_OR_RETURN(FolderManifest manifest, ReadManifest(dir.get(), name));
  OpenedFolder folder;
  folder.fields = std::move(manifest.fields);
  for (const FolderManifest::File& file : manifest.files) {
    WEFT_ASSIGN_OR_RETURN(const FileSource opened,
                          OpenFile(dir.get(), name, file.name));
    WEFT_ASSIGN_OR_RETURN(FileSource checked,
                          CheckWhileRead(opened, name, file));
    folder.files.push_back(std::move(checked));
  }
  return folder;
}

absl::StatusOr<nlohmann::json> ReadDurableFields(const std::string& parent,
                                                 const std::string& name) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenFolder(parent, name));
  WEFT_ASSIGN_OR_RETURN(FolderManifest manifest, ReadManifest(dir.get(), name));
  return std::move(manifest.fields);
}

absl::Status ReplaceDurableFields(const std::string& parent,
                                  const std::string& name,
                                  const nlohmann::json& fields) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenFolder(parent, name));
  WEFT_ASSIGN_OR_RETURN(FolderManifest manifest, ReadManifest(dir.get(), name));
  manifest.fields = fields;
  return PublishFileAt(dir.get(), kManifestFile, {EncodeManifest(manifest)},
                       /*replace=*/true);
}

absl::StatusOr<std::vector<ListedFolder>> ListDurableFolders(
    const std::string& parent) {
  std::vector<ListedFolder> folders;
  std::error_code error;
  if (std::filesystem::is_symlink(parent, error)) return folders;
  error.clear();
  std::filesystem::directory_iterator it(parent, error);
  for (; !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (it->is_symlink(ignored) || !CheckName(name).ok()) continue;
    struct stat manifest {};
    if (::lstat((it->path() / kManifestFile).c_str(), &manifest) == 0 &&
        S_ISREG(manifest.st_mode)) {
      folders.push_back({.name = name, .version = VersionOf(manifest)});
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return ErrnoStatus(error.value(), "listing folders");
  }
  std::ranges::sort(folders, {}, &ListedFolder::name);
  return folders;
}

absl::Status RemoveDurableFolder(const std::string& parent,
                                 const std::string& name) {
  WEFT_RETURN_IF_ERROR(OpenFolder(parent, name).status());
  WEFT_ASSIGN_OR_RETURN(const UniqueFd parent_fd, OpenParent(parent));
  // Renames the folder to the temporary name, which removes the folder `name`
  // in one step. Then the destructor of `temporary` deletes the files. A crash
  // after the rename leaves only a temporary folder.
  WEFT_ASSIGN_OR_RETURN(Temporary temporary,
                        Temporary::Create(parent, parent_fd.get()));
  if (Failpoint("files.rename") ||
      ::renameat(parent_fd.get(), name.c_str(), parent_fd.get(),
                 temporary.name().c_str()) != 0) {
    return ErrnoStatus(errno, "removing " + name);
  }
  return SyncDirectory(parent_fd.get(), "the parent of " + name);
}

absl::Status RemoveStaleTemporaries(const std::string& parent) {
  std::error_code error;
  std::vector<std::string> stale;
  std::filesystem::directory_iterator it(parent, error);
  for (; !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (absl::StartsWith(name, kTemporaryPrefix)) stale.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return ErrnoStatus(error.value(), "listing folders");
  }
  for (const std::string& name : stale) RemoveTree(parent, name);
  return absl::OkStatus();
}

}  // namespace weft
