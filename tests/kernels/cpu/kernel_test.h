// What tests of the CPU kernels share: a fixture that runs once for each
// instruction set, and random numbers.
#ifndef WEFT_TESTS_KERNELS_CPU_KERNEL_TEST_H_
#define WEFT_TESTS_KERNELS_CPU_KERNEL_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {

// table_ has the kernels of the instruction set. Skips the test on processors
// that lack it.
class KernelTest : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    table_ = KernelsFor(GetParam());
    if (table_ == nullptr) {
      GTEST_SKIP() << "this processor lacks the instruction set";
    }
  }

  const KernelTable* table_ = nullptr;
};

inline const auto kEveryIsa =
    ::testing::Values(Isa::kBaseline, Isa::kAvx2, Isa::kAvx512);

inline std::string IsaName(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "Baseline";
    case Isa::kAvx2:
      return "Avx2";
    case Isa::kAvx512:
      return "Avx512";
  }
  return "Unknown";
}

inline std::string CaseOfIsa(const ::testing::TestParamInfo<Isa>& test) {
  return IsaName(test.param);
}

// Returns normally distributed numbers.
inline std::vector<float> RandomValues(int64_t count, uint32_t seed,
                                       float scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

}  // namespace weft::kernels::cpu

#endif  // WEFT_TESTS_KERNELS_CPU_KERNEL_TEST_H_
