// Compares lists of the likeliest tokens with a sort.
#include "kernels/cuda/token_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

class CudaTokenListsTest : public CudaKernelTest {};

struct Listed {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
};

constexpr int32_t kUnlisted = -2;

// Lists tokens of the rows. In the result, an unused place follows each list.
Listed ListOnDevice(const std::vector<std::vector<float>>& logits,
                    std::vector<TokenList> lists) {
  const auto vocab = static_cast<int64_t>(logits[0].size());
  std::vector<float> rows;
  for (const std::vector<float>& row : logits) {
    rows.insert(rows.end(), row.begin(), row.end());
    rows.push_back(std::numeric_limits<float>::infinity());
  }
  int64_t size = 0;
  for (TokenList& list : lists) {
    list.begin = size;
    size += list.size + 1;
  }
  const DeviceBuffer<float> rows_device(rows);
  const DeviceBuffer<TokenList> lists_device(lists);
  const DeviceBuffer<int32_t> tokens(std::vector<int32_t>(size, kUnlisted));
  const DeviceBuffer<float> listed(std::vector<float>(size, NAN));
  EXPECT_EQ(ListTokens({.num_lists = static_cast<int64_t>(lists.size()),
                        .vocab = vocab,
                        .logits_MV = rows_device.data(),
                        .row_stride = vocab + 1,
                        .lists_N = lists_device.data(),
                        .tokens = tokens.data(),
                        .logits = listed.data()},
                       nullptr),
            cudaSuccess);
  return {tokens.Read(), listed.Read()};
}

std::vector<int32_t> Likeliest(const std::vector<float>& logits, int32_t size) {
  std::vector<int32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  std::ranges::stable_sort(
      tokens, [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  tokens.resize(size);
  std::ranges::sort(tokens);
  return tokens;
}

void Expect(const std::vector<std::vector<float>>& logits,
            const std::vector<TokenList>& lists) {
  const Listed listed = ListOnDevice(logits, lists);
  size_t begin = 0;
  for (const TokenList& list : lists) {
    SCOPED_TRACE(list.size);
    const std::vector<float>& row = logits[list.row];
    const std::vector<int32_t> expected = Likeliest(row, list.size);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(listed.tokens[begin + i], expected[i]) << i;
      EXPECT_EQ(listed.logits[begin + i], row[expected[i]]) << i;
    }
    begin += expected.size();
    EXPECT_EQ(listed.tokens[begin++], kUnlisted);
  }
}

TEST_F(CudaTokenListsTest, AreTheLikeliestInTheOrderOfIds) {
  const std::vector<std::vector<float>> logits = {RandomFloats(3001, 5, 4),
                                                  RandomFloats(3001, 6, 1e-3F)};
  Expect(logits, {{.row = 1, .size = 1},
                  {.row = 0, .size = 1024},
                  {.row = 0, .size = 3000},
                  {.row = 1, .size = 40},
                  {.row = 0, .size = 3001}});
}

// Of equal logits those with the lowest ids are listed, also zeros of both
// signs and tokens that are never drawn.
TEST_F(CudaTokenListsTest, EqualLogitsAreInTheOrderOfIds) {
  std::vector<float> steps = RandomFloats(2500, 7, 3);
  for (float& x : steps) x = std::round(x);
  std::vector<float> few(2500, -std::numeric_limits<float>::infinity());
  few[2400] = 1;
  few[70] = -1;
  Expect({steps, few}, {{.row = 0, .size = 100},
                        {.row = 0, .size = 1100},
                        {.row = 0, .size = 1400},
                        {.row = 1, .size = 2},
                        {.row = 1, .size = 1030}});
}

TEST_F(CudaTokenListsTest, AShortVocabularyAndNoListsAreFine) {
  Expect({{3, 1, 2}}, {{.size = 2}});
  EXPECT_EQ(ListTokens({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
