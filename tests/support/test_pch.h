// Precompiled for the tests that use neither LibTorch nor gRPC.
#ifndef WEFT_TESTS_SUPPORT_TEST_PCH_H_
#define WEFT_TESTS_SUPPORT_TEST_PCH_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#endif  // WEFT_TESTS_SUPPORT_TEST_PCH_H_
