#include "src/base/cgroup.h"

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

class CgroupTest : public ::testing::Test {
 protected:
  CgroupTest() { std::filesystem::create_directories(root_ + "/proc/self"); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }

  const TempFolder folder_;
  const std::string& root_ = folder_.path();
};

TEST_F(CgroupTest, TheSmallestLimitOfAGroupAndItsParentsCounts) {
  Write("/proc/self/cgroup", "0::/a.slice/b.service");
  const std::string top = "/sys/fs/cgroup";
  Write(top + "/a.slice/memory.max", "1000");
  Write(top + "/a.slice/memory.current", "400");
  Write(top + "/a.slice/memory.stat", "anon 5\ninactive_file 100");
  Write(top + "/a.slice/cpu.max", "150000 100000");
  Write(top + "/a.slice/b.service/memory.max", "max");
  Write(top + "/a.slice/b.service/memory.current", "300");
  Write(top + "/a.slice/b.service/cpu.max", "max 100000");
  const CgroupLimits limits = ReadCgroupLimits(root_);
  EXPECT_EQ(limits.memory_left, 700);
  EXPECT_EQ(limits.memory_group, root_ + top + "/a.slice");
  EXPECT_EQ(limits.cpus, 1.5);
}

TEST_F(CgroupTest, ReadsVersionOne) {
  Write("/proc/self/cgroup",
        "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/");
  const std::string memory = "/sys/fs/cgroup/memory";
  Write(memory + "/memory.limit_in_bytes", "9223372036854771712");
  Write(memory + "/memory.usage_in_bytes", "5");
  Write(memory + "/docker/x/memory.limit_in_bytes", "900");
  Write(memory + "/docker/x/memory.usage_in_bytes", "100");
  Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "50000");
  Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000");
  const CgroupLimits limits = ReadCgroupLimits(root_);
  EXPECT_EQ(limits.memory_left, 800);
  EXPECT_EQ(limits.cpus, 0.5);
}

TEST_F(CgroupTest, AContainerSeesItsGroupAsTheMount) {
  Write("/proc/self/cgroup", "0::/kubepods/pod7/container");
  Write("/sys/fs/cgroup/memory.max", "500");
  Write("/sys/fs/cgroup/memory.current", "600");
  Write("/sys/fs/cgroup/cpu.max", "400000 100000");
  const CgroupLimits limits = ReadCgroupLimits(root_);
  EXPECT_EQ(limits.memory_left, 0) << "the group is above its limit";
  EXPECT_EQ(limits.cpus, 4);
}

TEST_F(CgroupTest, WithoutGroupsThereAreNoLimits) {
  EXPECT_FALSE(ReadCgroupLimits(root_).memory_left.has_value());
  Write("/proc/self/cgroup", "no group\n0::/a");
  Write("/sys/fs/cgroup/a/memory.max", "many");
  Write("/sys/fs/cgroup/a/cpu.max", "1 0");
  const CgroupLimits limits = ReadCgroupLimits(root_);
  EXPECT_FALSE(limits.memory_left.has_value());
  EXPECT_FALSE(limits.cpus.has_value());
}

}  // namespace
}  // namespace weft
