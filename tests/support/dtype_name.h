// Names of tests that run once for each dtype.
#ifndef WEFT_TESTS_SUPPORT_DTYPE_NAME_H_
#define WEFT_TESTS_SUPPORT_DTYPE_NAME_H_

#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

#include <string>

namespace weft::testing {

// The fourth argument of INSTANTIATE_TEST_SUITE_P. Returns "Float", "BFloat16",
// ...
inline std::string DtypeName(
    const ::testing::TestParamInfo<at::ScalarType>& test) {
  return c10::toString(test.param);
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_DTYPE_NAME_H_
