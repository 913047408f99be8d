// Keeps objects as files in a folder, for tests and for a single machine. An
// object is the file of its key, so no key may be a folder of another: with
// "a/b" there is no "a". Several processes of a machine may use the folder. Its
// file system must have hard links and flock(2).
//
// An ETag is the SHA-256 of the object's bytes, so List reads what it lists.
#ifndef WEFT_SRC_STORE_FOLDER_STORE_H_
#define WEFT_SRC_STORE_FOLDER_STORE_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "src/base/files/file_io.h"
#include "src/store/object_store.h"

namespace weft::store {

// Errors are also those of file_io.h: RESOURCE_EXHAUSTED if the disk is full.
class FolderStore final : public ObjectStore {
 public:
  // Creates the folder if it is missing, and removes the temporary files of
  // processes that have ended. Keys have no part that begins with `.weft`.
  static absl::StatusOr<std::unique_ptr<FolderStore>> Open(std::string path);

  absl::StatusOr<std::string> Create(
      const std::string& key,
      const std::vector<std::string_view>& pieces) override;
  absl::StatusOr<std::string> Swap(const std::string& key,
                                   std::string_view bytes,
                                   const std::string& etag) override;
  absl::StatusOr<Object> Get(const std::string& key,
                             uint64_t max_bytes) override;
  absl::StatusOr<size_t> GetRange(const std::string& key, uint64_t offset,
                                  std::span<char> bytes,
                                  uint64_t* size) override;
  absl::StatusOr<std::vector<ListedObject>> List(const std::string& prefix,
                                                 const std::string& after,
                                                 size_t max_objects) override;
  absl::Status Delete(const std::string& key) override;
  absl::Status DeleteIf(const std::string& key,
                        const std::string& etag) override;
  std::string NameOf(const std::string& key) const override {
    return "file://" + path_ + "/" + key;
  }
  void Stop() override { stopping_ = true; }

 private:
  explicit FolderStore(std::string path) : path_(std::move(path)) {}

  absl::Status Check(const std::string& key) const;
  std::string PathOf(const std::string& key) const { return path_ + "/" + key; }
  absl::StatusOr<UniqueFd> OpenObject(const std::string& key) const;
  // Excludes other processes' and threads' swaps and deletions until the
  // descriptor is closed.
  absl::StatusOr<UniqueFd> Lock() const;
  // REQUIRES of both: the caller has the lock.
  absl::StatusOr<bool> HasEtag(const std::string& key,
                               const std::string& etag) const;
  absl::Status Remove(const std::string& key) const;

  const std::string path_;
  std::atomic<bool> stopping_ = false;
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_FOLDER_STORE_H_
