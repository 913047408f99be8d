// What the control groups of this process (its container, its systemd unit) let
// it use. Reads versions 1 and 2, and all parents of the process's group.
#ifndef WEFT_SRC_BASE_CGROUP_H_
#define WEFT_SRC_BASE_CGROUP_H_

#include <cstdint>
#include <optional>
#include <string>

namespace weft {

struct CgroupLimits {
  // Bytes that the process may still take, in the group with the least left.
  // Cached files that the kernel would give up count as free.
  std::optional<int64_t> memory_left;
  std::string memory_group;    // The folder of this group.
  std::optional<double> cpus;  // The smallest quota, in processors.
};

// `root` is the root of the file system. Limits that cannot be read are absent.
CgroupLimits ReadCgroupLimits(const std::string& root = "");

}  // namespace weft

#endif  // WEFT_SRC_BASE_CGROUP_H_
