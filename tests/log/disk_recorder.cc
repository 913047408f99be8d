#include "tests/log/disk_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <filesystem>
#include <fstream>

namespace weft {
namespace {

using Change = DiskRecorder::Change;
using Kind = Change::Kind;

constexpr uint64_t kSectorBytes = 512;

std::atomic<DiskRecorder*> recorder = nullptr;

std::string PathOf(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::string path(4096, '\0');
  const ssize_t size = ::readlink(link.c_str(), path.data(), path.size());
  path.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return path;
}

// A file or a folder: what is certainly on the disk, and the pending changes.
struct Node {
  std::string bytes;
  std::map<std::string, int> entries;
  std::vector<const Change*> pending;
};

bool Coin(DiskRecorder::Loss loss, std::mt19937* random) {
  if (loss == DiskRecorder::Loss::kSome) return (*random)() % 2 == 0;
  return loss == DiskRecorder::Loss::kNone;
}

void WriteSectors(const Change& change, DiskRecorder::Loss loss,
                  std::mt19937* random, std::string* bytes) {
  const uint64_t end = change.offset + change.bytes.size();
  for (uint64_t at = change.offset; at < end;) {
    const uint64_t next = std::min(end, (at / kSectorBytes + 1) * kSectorBytes);
    if (Coin(loss, random)) {
      if (bytes->size() < next) bytes->resize(next);
      bytes->replace(at, next - at, change.bytes, at - change.offset,
                     next - at);
    }
    at = next;
  }
}

void ChangeEntry(const Change& change, std::map<std::string, int>* entries) {
  if (change.kind == Kind::kLink) {
    (*entries)[change.name] = change.child;
    return;
  }
  const int child = (*entries)[change.name];
  entries->erase(change.name);
  if (change.kind == Kind::kRename) (*entries)[change.to] = child;
}

// Applies the pending changes that survive `loss`.
void Settle(Node* node, DiskRecorder::Loss loss, std::mt19937* random) {
  size_t entries = node->pending.size();
  if (loss == DiskRecorder::Loss::kAll) entries = 0;
  if (loss == DiskRecorder::Loss::kSome) entries = (*random)() % (entries + 1);
  for (size_t i = 0; i < node->pending.size(); ++i) {
    const Change& change = *node->pending[i];
    if (change.kind == Kind::kWrite) {
      WriteSectors(change, loss, random, &node->bytes);
    } else if (change.kind == Kind::kTruncate) {
      if (Coin(loss, random)) node->bytes.resize(change.offset);
    } else if (i < entries) {
      ChangeEntry(change, &node->entries);
    }
  }
  node->pending.clear();
}

}  // namespace

DiskRecorder::DiskRecorder(const std::string& root)
    : root_(std::filesystem::canonical(root)),
      nodes_{{root_, 0}},
      is_folder_{true} {
  recorder = this;
}

DiskRecorder::~DiskRecorder() { recorder = nullptr; }

size_t DiskRecorder::Moment() const {
  const std::lock_guard lock(mu_);
  return changes_.size();
}

int DiskRecorder::NodeOf(const std::string& path) const {
  const auto node = nodes_.find(path);
  return node == nodes_.end() ? -1 : node->second;
}

int DiskRecorder::NodeOf(int fd) const { return NodeOf(PathOf(fd)); }

void DiskRecorder::Add(Change change) {
  if (change.node >= 0) changes_.push_back(std::move(change));
}

void DiskRecorder::AddLink(int dir, const std::string& name, bool folder) {
  const std::lock_guard lock(mu_);
  // Only the test's folder itself is created by its path, with AT_FDCWD.
  const std::string parent =
      dir == AT_FDCWD ? std::filesystem::path(name).parent_path().string()
                      : PathOf(dir);
  const std::string last = std::filesystem::path(name).filename().string();
  const int node = NodeOf(parent);
  if (node < 0) return;
  const int child = static_cast<int>(is_folder_.size());
  is_folder_.push_back(folder);
  nodes_[parent + "/" + last] = child;
  Add({.kind = Kind::kLink, .node = node, .name = last, .child = child});
}

void DiskRecorder::Create(int dir, const std::string& name) {
  AddLink(dir, name, false);
}

void DiskRecorder::MakeFolder(int dir, const std::string& name) {
  AddLink(dir, name, true);
}

void DiskRecorder::Write(int fd, uint64_t offset, const std::string& bytes) {
  const std::lock_guard lock(mu_);
  Add({.kind = Kind::kWrite,
       .node = NodeOf(fd),
       .offset = offset,
       .bytes = bytes});
}

void DiskRecorder::Truncate(int fd, uint64_t size) {
  const std::lock_guard lock(mu_);
  Add({.kind = Kind::kTruncate, .node = NodeOf(fd), .offset = size});
}

void DiskRecorder::Rename(int dir, const std::string& from,
                          const std::string& to) {
  const std::lock_guard lock(mu_);
  const std::string parent = PathOf(dir);
  const int child = NodeOf(parent + "/" + from);
  if (child < 0) return;
  nodes_.erase(parent + "/" + from);
  nodes_[parent + "/" + to] = child;
  Add({.kind = Kind::kRename, .node = NodeOf(parent), .name = from, .to = to});
}

void DiskRecorder::Unlink(int dir, const std::string& name) {
  const std::lock_guard lock(mu_);
  const std::string parent = PathOf(dir);
  nodes_.erase(parent + "/" + name);
  Add({.kind = Kind::kUnlink, .node = NodeOf(parent), .name = name});
}

void DiskRecorder::Sync(int fd) {
  const std::lock_guard lock(mu_);
  Add({.kind = Kind::kSync, .node = NodeOf(fd)});
}

void DiskRecorder::MakeDisk(size_t moment, Loss loss, std::mt19937* random,
                            const std::string& root) const {
  const std::lock_guard lock(mu_);
  std::vector<Node> nodes(is_folder_.size());
  for (size_t i = 0; i < moment; ++i) {
    Node& node = nodes[changes_[i].node];
    if (changes_[i].kind == Kind::kSync) {
      Settle(&node, Loss::kNone, random);
    } else {
      node.pending.push_back(&changes_[i]);
    }
  }
  for (Node& node : nodes) Settle(&node, loss, random);
  std::vector<std::pair<int, std::string>> paths = {{0, root}};
  while (!paths.empty()) {
    const auto [number, path] = paths.back();
    paths.pop_back();
    if (!is_folder_[number]) {
      std::ofstream(path, std::ios::binary) << nodes[number].bytes;
      continue;
    }
    std::filesystem::create_directory(path);
    for (const auto& [name, child] : nodes[number].entries) {
      paths.emplace_back(child, path + "/" + name);
    }
  }
}

}  // namespace weft

// The linker redirects calls of NAME to __wrap_NAME, and __real_NAME is the
// original function.
using weft::recorder;

extern "C" {

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd) {
  const int result = __real_fdatasync(fd);
  if (result == 0 && recorder) recorder.load()->Sync(fd);
  return result;
}

int __real_fsync(int fd);
int __wrap_fsync(int fd) {
  const int result = __real_fsync(fd);
  if (result == 0 && recorder) recorder.load()->Sync(fd);
  return result;
}

int __real_ftruncate(int fd, off_t size);
int __wrap_ftruncate(int fd, off_t size) {
  const int result = __real_ftruncate(fd, size);
  if (result == 0 && recorder) {
    recorder.load()->Truncate(fd, static_cast<uint64_t>(size));
  }
  return result;
}

int __real_mkdirat(int dir, const char* name, mode_t mode);
int __wrap_mkdirat(int dir, const char* name, mode_t mode) {
  const int result = __real_mkdirat(dir, name, mode);
  if (result == 0 && recorder) recorder.load()->MakeFolder(dir, name);
  return result;
}

int __real_openat(int dir, const char* name, int flags, ...);
int __wrap_openat(int dir, const char* name, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(arguments, unsigned) : 0U;
  va_end(arguments);
  const bool is_new = (flags & O_CREAT) != 0 && recorder &&
                      ::faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
  const int fd = __real_openat(dir, name, flags, mode);
  if (fd >= 0 && is_new) recorder.load()->Create(dir, name);
  return fd;
}

ssize_t __real_pwrite(int fd, const void* data, size_t size, off_t offset);
ssize_t __wrap_pwrite(int fd, const void* data, size_t size, off_t offset) {
  const ssize_t n = __real_pwrite(fd, data, size, offset);
  if (n > 0 && recorder) {
    recorder.load()->Write(
        fd, static_cast<uint64_t>(offset),
        std::string(static_cast<const char*>(data), static_cast<size_t>(n)));
  }
  return n;
}

int __real_renameat2(int from_dir, const char* from, int to_dir, const char* to,
                     unsigned flags);
int __wrap_renameat2(int from_dir, const char* from, int to_dir, const char* to,
                     unsigned flags) {
  const int result = __real_renameat2(from_dir, from, to_dir, to, flags);
  if (result == 0 && recorder) recorder.load()->Rename(from_dir, from, to);
  return result;
}

int __real_unlinkat(int dir, const char* name, int flags);
int __wrap_unlinkat(int dir, const char* name, int flags) {
  const int result = __real_unlinkat(dir, name, flags);
  if (result == 0 && recorder) recorder.load()->Unlink(dir, name);
  return result;
}

}  // extern "C"
