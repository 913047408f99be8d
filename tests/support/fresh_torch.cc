// Part of each test program that links LibTorch. Before each test, it resets
// LibTorch's number of threads and random generator to those of a new process.
// So a test does not depend on the tests that ran before it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <mutex>

#include "gtest/gtest.h"

namespace weft {
namespace {

class FreshTorch : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    if (at::get_num_threads() != num_threads_) {
      at::set_num_threads(num_threads_);
    }
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(c10::default_rng_seed_val);
  }

 private:
  const int num_threads_ = at::get_num_threads();
};

[[maybe_unused]] const bool added = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new FreshTorch);
  return true;
}();

}  // namespace
}  // namespace weft
