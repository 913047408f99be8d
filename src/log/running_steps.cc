#include "src/log/running_steps.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include "src/base/files/file_io.h"
#include "src/base/status_macros.h"

namespace weft::log {
namespace {

constexpr size_t kMaxSuspects = 512;
constexpr size_t kMaxRunning = 1024;  // Of more steps, these are noted.

// Returns a number that other steps do not have, except by accident. The digest
// of a payload begins with its type, and the other bytes are a SHA-256.
uint64_t NameOf(AdapterKey key, uint64_t step, const std::string& digest) {
  uint64_t name = 0;
  if (digest.size() > sizeof(name)) {
    std::memcpy(&name, &digest[digest.size() - sizeof(name)], sizeof(name));
  }
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  return name ^ (static_cast<uint64_t>(key) * kOdd + step) * kOdd;
}

}  // namespace

// The file's content, in the machine's byte order.
struct RunningSteps::File {
  struct Suspect {
    uint64_t name = 0;
    uint64_t ends = 0;  // 0: the entry is not used.
  };
  std::array<Suspect, kMaxSuspects> suspects = {};
  std::array<uint64_t, kMaxRunning> running = {};
  std::atomic<uint64_t> num_running = 0;  // Written after `running`.
};

absl::StatusOr<std::unique_ptr<RunningSteps>> RunningSteps::Open(
    int directory, const std::string& file_name) {
  Suspects suspects;
  const absl::StatusOr<std::string> bytes = ReadFileAt(directory, file_name);
  if (!bytes.ok() && !absl::IsNotFound(bytes.status())) return bytes.status();
  File file;
  if (bytes.ok() && bytes->size() == sizeof(file)) {
    std::memcpy(static_cast<void*>(&file), bytes->data(), sizeof(file));
  }
  // The running ones come first, so that they stay if there are too many.
  const size_t num_running = std::min<size_t>(file.num_running, kMaxRunning);
  for (size_t i = 0; i < num_running; ++i) suspects[file.running[i]] = 1;
  for (const auto& [name, ends] : file.suspects) {
    const bool ran = suspects.contains(name);
    if (ran || (ends > 1 && suspects.size() < kMaxSuspects)) {
      suspects[name] += ends;
    }
  }
  File next;
  size_t used = 0;
  for (const auto& [name, ends] : suspects) {
    if (used < kMaxSuspects) next.suspects[used++] = {name, ends};
  }
  WEFT_RETURN_IF_ERROR(PublishFileAt(
      directory, file_name,
      {std::string_view(reinterpret_cast<const char*>(&next), sizeof(next))},
      /*replace=*/true));
  const UniqueFd fd(
      ::openat(directory, file_name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening RUNNING");
  void* const mapped = ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE,
                              MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return ErrnoStatus(errno, "mapping RUNNING");
  return std::unique_ptr<RunningSteps>(
      new RunningSteps(std::move(suspects), static_cast<File*>(mapped)));
}

RunningSteps::~RunningSteps() { ::munmap(file_, sizeof(File)); }

uint64_t RunningSteps::EndsOf(AdapterKey key, uint64_t step,
                              const std::string& digest) const {
  const auto suspect = suspects_.find(NameOf(key, step, digest));
  return suspect == suspects_.end() ? 0 : suspect->second;
}

void RunningSteps::Begin(AdapterKey key, uint64_t step,
                         const std::string& digest) {
  const uint64_t count = file_->num_running.load(std::memory_order_relaxed);
  if (count == kMaxRunning || excused_.load()) return;
  file_->running[count] = NameOf(key, step, digest);
  file_->num_running.store(count + 1, std::memory_order_release);
}

void RunningSteps::End() {
  file_->num_running.store(0, std::memory_order_release);
}

void RunningSteps::Excuse() {
  excused_.store(true);
  End();
}

}  // namespace weft::log
