#include "src/engine/device/host_allocator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "src/engine/device/compute_guard.h"

namespace weft::engine {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class HostAllocatorTest : public ::testing::Test {
 protected:
  // Raises the allocator's peak of bytes in use to kPeak.
  void SetUp() override {
    allocator_.allocate(kPeak);
    allocator_.ReleaseCached();
  }
  void TearDown() override { allocator_.ReleaseCached(); }

  // No test of this class holds more bytes at once. SetUp's block takes no
  // memory, because nothing writes to it.
  static constexpr size_t kPeak = 512 * kMiB;

  HostAllocator& allocator_ = HostAllocator::Get();
};

TEST_F(HostAllocatorTest, ABlockIsUsedAgainForWhatIsSlightlySmaller) {
  void* first = nullptr;
  {
    const c10::DataPtr block = allocator_.allocate(16 * kMiB);
    first = block.get();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % (2 * kMiB), 0);
    std::memset(first, 1, 16 * kMiB);
    EXPECT_EQ(allocator_.usage().in_use, 16 * kMiB);
  }
  EXPECT_EQ(allocator_.usage().cached, 16 * kMiB);
  EXPECT_EQ(allocator_.allocate(15 * kMiB).get(), first);
  EXPECT_NE(allocator_.allocate(12 * kMiB).get(), first);
}

TEST_F(HostAllocatorTest, AtThePeakALargerBlockIsUsedInsteadOfANewOne) {
  const c10::DataPtr held = allocator_.allocate(kPeak - 16 * kMiB);
  void* const block = allocator_.allocate(16 * kMiB).get();
  EXPECT_EQ(allocator_.allocate(9 * kMiB).get(), block);
  EXPECT_EQ(allocator_.usage().cached, 16 * kMiB);
  (void)allocator_.allocate(7 * kMiB);
  EXPECT_EQ(allocator_.usage().cached, 7 * kMiB);
}

TEST_F(HostAllocatorTest, LargerBlocksLeaveAtMostAnEighthOfThePeakUnused) {
  std::vector<c10::DataPtr> blocks;
  for (size_t i = 0; i < kPeak / (32 * kMiB); ++i) {
    blocks.push_back(allocator_.allocate(32 * kMiB));
  }
  blocks.clear();
  for (int i = 0; i < 5; ++i) blocks.push_back(allocator_.allocate(17 * kMiB));
  EXPECT_EQ(allocator_.usage().in_use, (4 * 32 + 17) * kMiB);
}

TEST_F(HostAllocatorTest, TheBlockThatWasFreedLastIsUsedFirst) {
  c10::DataPtr first = allocator_.allocate(16 * kMiB);
  c10::DataPtr last = allocator_.allocate(16 * kMiB);
  void* const freed_last = last.get();
  first.clear();
  last.clear();
  EXPECT_EQ(allocator_.allocate(16 * kMiB).get(), freed_last);
}

TEST_F(HostAllocatorTest, TheProcessIsNeverLargerThanWhatWasInUse) {
  const c10::DataPtr held = allocator_.allocate(kPeak - 32 * kMiB);
  std::vector<c10::DataPtr> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(allocator_.allocate(8 * kMiB));
  ASSERT_EQ(allocator_.usage().in_use, kPeak);
  blocks.clear();
  for (size_t size = kMiB; size <= 20 * kMiB; size += kMiB) {
    blocks.clear();
    blocks.push_back(allocator_.allocate(size));
    const HostAllocator::Usage usage = allocator_.usage();
    EXPECT_LE(usage.in_use + usage.cached, kPeak) << size;
  }
}

TEST_F(HostAllocatorTest, BlocksThatNobodyUsesForAWholeIntervalGoBack) {
  { const c10::DataPtr early = allocator_.allocate(16 * kMiB); }
  allocator_.ReleaseUnused();
  EXPECT_EQ(allocator_.usage().cached, 16 * kMiB);
  {
    const c10::DataPtr again = allocator_.allocate(16 * kMiB);
    const c10::DataPtr late = allocator_.allocate(32 * kMiB);
  }
  allocator_.ReleaseUnused();
  EXPECT_EQ(allocator_.usage().cached, 48 * kMiB);
  { const c10::DataPtr again = allocator_.allocate(16 * kMiB); }
  allocator_.ReleaseUnused();
  EXPECT_EQ(allocator_.usage().cached, 16 * kMiB);
  allocator_.ReleaseUnused();
  EXPECT_EQ(allocator_.usage().cached, 0);
}

TEST_F(HostAllocatorTest, SmallBlocksAndLargeOnesGoBackWhereTheyCameFrom) {
  for (const size_t size : {size_t{0}, size_t{100}, kMiB - 1, kMiB, 3 * kMiB}) {
    void* const block = allocator_.raw_allocate(size);
    if (size > 0) std::memset(block, 1, size);
    EXPECT_EQ(allocator_.usage().in_use > 0, size >= kMiB) << size;
    allocator_.raw_deallocate(block);
    EXPECT_EQ(allocator_.usage().in_use, 0) << size;
  }
}

TEST_F(HostAllocatorTest, MemoryThatDoesNotExistIsResourceExhausted) {
  { const c10::DataPtr cached = allocator_.allocate(4 * kMiB); }
  const absl::Status status = RunGuarded(
      "allocating", [this] { (void)allocator_.allocate(size_t{1} << 60); });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(allocator_.usage().cached, 0);
}

TEST_F(HostAllocatorTest, ThreadsFreeWhatOthersHaveAllocated) {
  std::vector<c10::DataPtr> blocks(64);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50; ++round) {
        for (size_t i = t; i < blocks.size(); i += 4) {
          blocks[i] = allocator_.allocate(kMiB + i * (kMiB / 16));
          std::memset(blocks[i].get(), static_cast<int>(t), 64);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(*static_cast<const char*>(blocks[i].get()), i % 4);
  }
  blocks.clear();
  EXPECT_EQ(allocator_.usage().in_use, 0);
}

TEST_F(HostAllocatorTest, TensorsKeepTheirValues) {
  HostAllocator::Install();
  const at::Tensor ones = at::ones({1024, 1024}, at::kFloat);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(at::equal(ones + i - i, ones));
  }
}

}  // namespace
}  // namespace weft::engine
