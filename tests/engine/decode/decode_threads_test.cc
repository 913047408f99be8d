#include "src/engine/decode/decode_threads.h"

#include <ATen/Parallel.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

namespace weft::engine {
namespace {

// The kernel's table of processors without any idle time: other processes take
// whatever this process does not use.
class BusyMachine : public ::testing::Test {
 protected:
  BusyMachine() {
    std::filesystem::create_directories(root_ + "/proc");
    std::ofstream file(root_ + "/proc/stat");
    for (int i = 0; i < 1024; ++i) file << "cpu" << i << " 1 1 1 1 1\n";
    at::set_num_threads(4);
  }

  static int ThreadsOf(DecodeThreads& threads) {
    int count = 0;
    threads.Run([&] { count = at::get_num_threads(); });
    EXPECT_EQ(at::get_num_threads(), 4);
    return count;
  }

  const TempFolder folder_;
  const std::string root_ = folder_.path();
};

TEST_F(BusyMachine, LeavesOneThreadToDecoding) {
  DecodeThreads threads(/*adapts=*/true, ProcessorShare(root_));
  EXPECT_EQ(ThreadsOf(threads), 4) << "before the first interval has passed";
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(ThreadsOf(threads), 1);
}

TEST_F(BusyMachine, ChangesNothingIfTheNumberIsFixed) {
  DecodeThreads threads(/*adapts=*/false, ProcessorShare(root_));
  ThreadsOf(threads);
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(ThreadsOf(threads), 4);
}

TEST_F(BusyMachine, KeepsTheNumberAfterAnException) {
  DecodeThreads threads(/*adapts=*/true, ProcessorShare(root_));
  ThreadsOf(threads);
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_THROW(threads.Run([] { throw std::runtime_error("lost"); }),
               std::runtime_error);
  EXPECT_EQ(at::get_num_threads(), 4);
}

}  // namespace
}  // namespace weft::engine
