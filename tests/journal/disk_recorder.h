// Records what a program does to the files below a folder, and makes the disks
// that a loss of power may leave at any moment of it.
//
// The system calls come here by the linker's --wrap. The model of the disk is
// POSIX's, without what file systems add: bytes of a file are there for sure
// once the file was synced, a name once its folder was. Without that, any
// sectors of a file may be there, and the first few of a folder's changes.
// Renames are within a folder.
#ifndef WEFT_TESTS_JOURNAL_DISK_RECORDER_H_
#define WEFT_TESTS_JOURNAL_DISK_RECORDER_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace weft {

class DiskRecorder {
 public:
  // Records what happens below `root`, which is empty; one at a time.
  explicit DiskRecorder(const std::string& root);
  ~DiskRecorder();
  DiskRecorder(const DiskRecorder&) = delete;
  DiskRecorder& operator=(const DiskRecorder&) = delete;

  // What has happened until now, as a number for MakeDisk.
  [[nodiscard]] size_t Moment() const;

  // Which part of what was not synced is there.
  enum class Loss { kAll, kNone, kSome };
  // Makes the disk at a moment, below `root`, which does not exist.
  void MakeDisk(size_t moment, Loss loss, std::mt19937* random,
                const std::string& root) const;

  // What the wrapped calls tell, after they have succeeded.
  void Create(int dir, const std::string& name);
  void MakeFolder(int dir, const std::string& name);
  void Write(int fd, uint64_t offset, const std::string& bytes);
  void Truncate(int fd, uint64_t size);
  void Rename(int dir, const std::string& from, const std::string& to);
  void Unlink(int dir, const std::string& name);
  void Sync(int fd);

  // A change; which fields count depends on the kind.
  struct Change {
    enum class Kind { kLink, kUnlink, kRename, kWrite, kTruncate, kSync };
    Kind kind;
    int node = 0;  // The folder or file that changes.
    std::string name;
    std::string to;
    int child = 0;
    uint64_t offset = 0;
    std::string bytes;
  };

 private:
  // The number of the file or folder at a path; none: -1.
  int NodeOf(const std::string& path) const;
  int NodeOf(int fd) const;
  void Add(Change change);
  void AddLink(int dir, const std::string& name, bool folder);

  const std::string root_;
  mutable std::mutex mu_;
  std::vector<Change> changes_;
  std::map<std::string, int> nodes_;  // By path, as they are now.
  std::vector<bool> is_folder_;       // By number.
};

}  // namespace weft

#endif  // WEFT_TESTS_JOURNAL_DISK_RECORDER_H_
