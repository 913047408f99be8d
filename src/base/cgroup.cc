#include "src/base/cgroup.h"

#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace weft {
namespace {

// Version 1 shows "no limit" as the largest multiple of a page.
constexpr int64_t kNoLimit = int64_t{1} << 60;

// Returns the number at the start of a file. Absent for "max" and -1, which
// mean that there is no limit.
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t number = -1;
  file >> number;
  if (file.fail() || number < 0 || number >= kNoLimit) return std::nullopt;
  return number;
}

// Returns the value of a line "KEY VALUE"; 0 if there is none.
int64_t ReadField(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  int64_t value = 0;
  for (std::string name; file >> name >> value;) {
    if (name == key) return value;
  }
  return 0;
}

// The files of one version.
struct Files {
  const char* limit;
  const char* used;
  const char* cached;  // The key in memory.stat.
};
constexpr Files kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr Files kVersion2 = {"memory.max", "memory.current", "inactive_file"};

void ReadMemory(const std::string& folder, const Files& files,
                CgroupLimits* limits) {
  const auto limit = ReadNumber(absl::StrCat(folder, "/", files.limit));
  const auto used = ReadNumber(absl::StrCat(folder, "/", files.used));
  if (!limit || !used) return;
  const int64_t left =
      *limit - *used +
      ReadField(absl::StrCat(folder, "/memory.stat"), files.cached);
  if (limits->memory_left && *limits->memory_left <= left) return;
  limits->memory_left = std::max<int64_t>(left, 0);
  limits->memory_group = folder;
}

void ReadCpus(std::optional<int64_t> quota, std::optional<int64_t> period,
              CgroupLimits* limits) {
  if (!quota || !period || *period == 0) return;
  const double cpus =
      static_cast<double>(*quota) / static_cast<double>(*period);
  if (!limits->cpus || cpus < *limits->cpus) limits->cpus = cpus;
}

void ReadCpuMax(const std::string& folder, CgroupLimits* limits) {
  std::ifstream file(absl::StrCat(folder, "/cpu.max"));
  int64_t quota = 0;
  int64_t period = 0;
  if (file >> quota >> period) ReadCpus(quota, period, limits);
}

// Returns the folders of `group` and of its parents below `mount`. In a
// namespace of its own, a process may not see its group by the name that the
// kernel shows, but sees it as `mount`.
std::vector<std::string> FoldersOf(const std::string& mount,
                                   const std::string& group) {
  std::vector<std::string> folders = {mount};
  for (const absl::string_view part :
       absl::StrSplit(group, '/', absl::SkipEmpty())) {
    const std::string folder = absl::StrCat(folders.back(), "/", part);
    std::error_code error;
    if (part == ".." || !std::filesystem::is_directory(folder, error)) break;
    folders.push_back(folder);
  }
  return folders;
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& root) {
  CgroupLimits limits;
  const std::string mounts = absl::StrCat(root, "/sys/fs/cgroup");
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    // NUMBER:CONTROLLERS:GROUP; version 2 has no controllers.
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    for (const std::string& controller : controllers) {
      const std::string mount =
          controller.empty() ? mounts : absl::StrCat(mounts, "/", controller);
      for (const std::string& folder : FoldersOf(mount, parts[2])) {
        if (controller.empty()) {
          ReadMemory(folder, kVersion2, &limits);
          ReadCpuMax(folder, &limits);
        } else if (controller == "memory") {
          ReadMemory(folder, kVersion1, &limits);
        } else if (controller == "cpu") {
          ReadCpus(ReadNumber(absl::StrCat(folder, "/cpu.cfs_quota_us")),
                   ReadNumber(absl::StrCat(folder, "/cpu.cfs_period_us")),
                   &limits);
        }
      }
    }
  }
  return limits;
}

}  // namespace weft
