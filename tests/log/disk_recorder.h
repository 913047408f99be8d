// Records what a program does to the files below a folder, and makes the disks
// that a loss of power may leave at any moment.
//
// The linker's --wrap redirects the system calls to the recorder. The model of
// the disk is POSIX's, without the guarantees that file systems add. The bytes
// of a file are certain once the file is synced, and a name is certain once its
// folder is synced. Before the sync, the disk may have any of a file's written
// sectors, and only the first few changes of a folder. Renames stay within a
// folder.
#ifndef WEFT_TESTS_LOG_DISK_RECORDER_H_
#define WEFT_TESTS_LOG_DISK_RECORDER_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace weft {

class DiskRecorder {
 public:
  // Records what happens below `root`, which is empty. Only one recorder may
  // exist at a time.
  explicit DiskRecorder(const std::string& root);
  ~DiskRecorder();
  DiskRecorder(const DiskRecorder&) = delete;
  DiskRecorder& operator=(const DiskRecorder&) = delete;

  // Returns a number for the present moment, which MakeDisk takes.
  size_t Moment() const;

  // Says how many of the changes that were not synced are lost.
  enum class Loss { kAll, kNone, kSome };
  // Creates the folder `root` with the files that the disk has after a loss of
  // power at `moment`.
  void MakeDisk(size_t moment, Loss loss, std::mt19937* random,
                const std::string& root) const;

  // The wrapped system calls call these functions after they have succeeded.
  void Create(int dir, const std::string& name);
  void MakeFolder(int dir, const std::string& name);
  void Write(int fd, uint64_t offset, const std::string& bytes);
  void Truncate(int fd, uint64_t size);
  void Rename(int dir, const std::string& from, const std::string& to);
  void Unlink(int dir, const std::string& name);
  void Sync(int fd);

  // A change. `kind` says which other fields are used.
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
  // Returns the number of the file or folder at a path, or -1.
  int NodeOf(const std::string& path) const;
  int NodeOf(int fd) const;
  void Add(Change change);
  void AddLink(int dir, const std::string& name, bool folder);

  const std::string root_;
  mutable std::mutex mu_;
  std::vector<Change> changes_;
  std::map<std::string, int> nodes_;  // The present nodes by path.
  std::vector<bool> is_folder_;       // Index: the node's number.
};

}  // namespace weft

#endif  // WEFT_TESTS_LOG_DISK_RECORDER_H_
