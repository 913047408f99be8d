// Compares Rotary and RotaryBackward with the f64 loops of
// tests/kernels/cpu/reference.h: with and without norms and pages, on heads
// that are slices of a projection.
#include "kernels/cuda/rotary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/cpu/reference.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

namespace reference = weft::kernels::cpu::reference;

constexpr float kEps = 1e-5F;
constexpr int64_t kNumQ = 3;
constexpr int64_t kNumK = 2;
constexpr int64_t kTokens = 4;
const std::vector<int32_t> kPositions = {5, 0, 7, 7};
constexpr int64_t kNumPositions = 8;
// The third token is not written to the pages.
const std::vector<int64_t> kSlots = {6, 2, -1, 0};
constexpr int64_t kNumSlots = 7;

// A projection [T, width] with q, k and v heads and `gap` elements after the
// heads. It begins `offset` elements after the start of an allocation.
struct Layout {
  int64_t half = 0;
  int64_t gap = 0;
  int64_t offset = 0;

  int64_t features() const { return 2 * half; }
  int64_t width() const { return (kNumQ + 2 * kNumK) * features() + gap; }
  int64_t size() const { return offset + kTokens * width(); }
  // Returns the index of a head's first element. Heads of q have the lowest
  // numbers, then k, then v.
  int64_t At(int64_t token, int64_t head) const {
    return offset + token * width() + head * features();
  }
  HeadRows Heads(const DeviceArray& data, int64_t first, int64_t count) const {
    return {.data = data.at(At(0, first)),
            .num_heads = count,
            .token_stride = width(),
            .head_stride = features()};
  }
};

// Returns layouts that are read in packs and layouts that are read element by
// element. Their heads include those of served models.
std::vector<Layout> Layouts() {
  return {{.half = 1, .gap = 3},  {.half = 3},
          {.half = 32},           {.half = 64},
          {.half = 64, .gap = 5}, {.half = 64, .offset = 1},
          {.half = 48, .gap = 8}, {.half = 100},
          {.half = 128}};
}

class CudaRotaryTest : public CudaDtypeTest {
 protected:
  // Angles and weights on the device, and the launch's arguments.
  struct Problem {
    Problem(const Layout& of, DType head_dtype, DType norm_dtype)
        : layout(of),
          cos(RandomFloats(kNumPositions * of.half, 7)),
          sin(RandomFloats(kNumPositions * of.half, 8)),
          q_C(Rounded(norm_dtype, RandomFloats(of.features(), 9))),
          k_C(Rounded(norm_dtype, RandomFloats(of.features(), 10))),
          positions(kPositions),
          cos_device(cos),
          sin_device(sin),
          q_C_device(norm_dtype, q_C),
          k_C_device(norm_dtype, k_C),
          norms{norm_dtype, kEps, q_C_device.data(), k_C_device.data()},
          dtype(head_dtype) {}

    RotaryRows Rows(const DeviceArray& data) const {
      return {.dtype = dtype,
              .num_tokens = kTokens,
              .half_features = layout.half,
              .q = layout.Heads(data, 0, kNumQ),
              .k = layout.Heads(data, kNumQ, kNumK),
              .positions_T = positions.data(),
              .cos_PC = cos_device.data(),
              .sin_PC = sin_device.data()};
    }
    const std::vector<float>& WeightOf(int64_t head) const {
      return head < kNumQ ? q_C : k_C;
    }
    // Returns the head rotated, or rotated back.
    std::vector<double> Rotated(const std::vector<float>& head, int64_t token,
                                bool back) const {
      const int64_t at = kPositions[token] * layout.half;
      return reference::RotaryHead(head, Slice(cos, at, layout.half),
                                   Slice(sin, at, layout.half), back);
    }

    Layout layout;
    std::vector<float> cos, sin, q_C, k_C;
    DeviceBuffer<int32_t> positions;
    DeviceBuffer<float> cos_device, sin_device;
    DeviceArray q_C_device, k_C_device;
    HeadNorms norms;
    DType dtype;
  };

  static std::vector<float> ToFloats(const std::vector<double>& values) {
    return Rounded(GetParam(), {values.begin(), values.end()});
  }
  // Compares one head. Its values are rounded once between norm and rotation.
  void ExpectHead(const std::vector<float>& actual, int64_t at,
                  const std::vector<double>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const double largest = 16 + 4 * std::abs(expected[i]);
      ASSERT_NEAR(actual[at + static_cast<int64_t>(i)], expected[i],
                  StoredTolerance(EpsilonOf(GetParam()), 2, largest, largest));
    }
  }

  void CheckForward(const Layout& layout, bool with_norms, DType norm_dtype);
  void CheckBackward(const Layout& layout, DType norm_dtype);
};

void CudaRotaryTest::CheckForward(const Layout& layout, bool with_norms,
                                  DType norm_dtype) {
  const Problem problem(layout, GetParam(), norm_dtype);
  const std::vector<float> before =
      Rounded(GetParam(), RandomFloats(layout.size(), 6));
  const DeviceArray data(GetParam(), before);
  const int64_t row = kNumK * layout.features();
  const std::vector<float> untouched(kNumSlots * row, 5);
  const DeviceArray k_pages(GetParam(), untouched),
      v_pages(GetParam(), untouched);
  const DeviceBuffer<int64_t> slots(kSlots);
  const KvSlots places = {.v = layout.Heads(data, kNumQ + kNumK, kNumK),
                          .slots_T = slots.data(),
                          .k_pages = k_pages.data(),
                          .v_pages = v_pages.data()};
  ASSERT_EQ(Rotary(problem.Rows(data), with_norms ? problem.norms : HeadNorms(),
                   with_norms ? places : KvSlots(), nullptr),
            cudaSuccess);
  const std::vector<float> after = data.Read();
  std::vector<float> k_expected = untouched, v_expected = untouched;
  std::vector<float> expected = before;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t head = 0; head < kNumQ + kNumK; ++head) {
      const int64_t at = layout.At(t, head);
      std::vector<float> x = Slice(before, at, layout.features());
      if (with_norms) {
        x = ToFloats(reference::RmsNormRow(x, problem.WeightOf(head), kEps));
      }
      ExpectHead(after, at, problem.Rotated(x, t, /*back=*/false));
      if (HasFatalFailure()) return;
      std::copy_n(after.begin() + at, layout.features(), expected.begin() + at);
    }
    if (!with_norms || kSlots[t] < 0) continue;
    std::copy_n(after.begin() + layout.At(t, kNumQ), row,
                k_expected.begin() + kSlots[t] * row);
    std::copy_n(before.begin() + layout.At(t, kNumQ + kNumK), row,
                v_expected.begin() + kSlots[t] * row);
  }
  // In the heads, only q and k change. The pages get copies of k and v.
  ASSERT_EQ(after, expected);
  ASSERT_EQ(k_pages.Read(), k_expected);
  ASSERT_EQ(v_pages.Read(), v_expected);
}

void CudaRotaryTest::CheckBackward(const Layout& layout, DType norm_dtype) {
  const Problem problem(layout, GetParam(), norm_dtype);
  const std::vector<float> dy =
      Rounded(GetParam(), RandomFloats(layout.size(), 6));
  const std::vector<float> raw =
      Rounded(GetParam(), RandomFloats(layout.size(), 11));
  // The first call has no norms and rotates back in place. The second call has
  // norms and reads dy from another tensor.
  const DeviceArray rotated(GetParam(), dy), dy_device(GetParam(), dy);
  const DeviceArray normed(GetParam(), raw), raw_device(GetParam(), raw);
  ASSERT_EQ(RotaryBackward(problem.Rows(rotated), {},
                           {.q = layout.Heads(rotated, 0, kNumQ),
                            .k = layout.Heads(rotated, kNumQ, kNumK)},
                           nullptr),
            cudaSuccess);
  const int64_t first_v = kNumQ + kNumK;
  ASSERT_EQ(RotaryBackward(problem.Rows(normed), problem.norms,
                           {.q = layout.Heads(dy_device, 0, kNumQ),
                            .k = layout.Heads(dy_device, kNumQ, kNumK),
                            .v = layout.Heads(dy_device, first_v, kNumK),
                            .v_to = layout.Heads(normed, first_v, kNumK),
                            .raw_q = layout.Heads(raw_device, 0, kNumQ),
                            .raw_k = layout.Heads(raw_device, kNumQ, kNumK)},
                           nullptr),
            cudaSuccess);
  const std::vector<float> d = rotated.Read(), dx = normed.Read();
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t head = 0; head < kNumQ + kNumK; ++head) {
      const int64_t at = layout.At(t, head);
      ExpectHead(d, at,
                 problem.Rotated(Slice(dy, at, layout.features()), t,
                                 /*back=*/true));
      ExpectHead(
          dx, at,
          reference::RmsNormBackwardRow(Slice(d, at, layout.features()),
                                        Slice(raw, at, layout.features()),
                                        problem.WeightOf(head), kEps));
      if (HasFatalFailure()) return;
    }
    const int64_t v = layout.At(t, kNumQ + kNumK);
    ASSERT_EQ(Slice(dx, v, kNumK * layout.features()),
              Slice(dy, v, kNumK * layout.features()));
    ASSERT_EQ(Slice(d, v, kNumK * layout.features()),
              Slice(dy, v, kNumK * layout.features()));
  }
}

TEST_P(CudaRotaryTest, RotatesTheHeadsOfBoth) {
  for (const Layout& layout : Layouts()) {
    CheckForward(layout, /*with_norms=*/false, GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaRotaryTest, NormsRotatesAndWritesToPagesInOneLaunch) {
  for (const Layout& layout : Layouts()) {
    CheckForward(layout, /*with_norms=*/true, GetParam());
    CheckForward(layout, /*with_norms=*/true, DType::kF32);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaRotaryTest, BackwardUndoesTheRotationAndTheNorms) {
  for (const Layout& layout : Layouts()) {
    if (layout.half == 1)
      continue;  // With two features the norm is nearly
                 // flat.
    CheckBackward(layout, GetParam());
    CheckBackward(layout, DType::kF32);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaRotaryTest, NothingToDoIsNoError) {
  EXPECT_EQ(Rotary({.dtype = GetParam(), .half_features = 4}, {}, {}, nullptr),
            cudaSuccess);
  EXPECT_EQ(
      RotaryBackward({.dtype = GetParam(), .num_tokens = 3}, {}, {}, nullptr),
      cudaSuccess);
}

TEST_F(CudaKernelTest, RotaryRefusesBf16NormsBesideF32HeadsAndHugeTokens) {
  RotaryRows rows = {.dtype = DType::kF32,
                     .num_tokens = 1,
                     .half_features = 4,
                     .q = {.num_heads = 1}};
  const float weight = 1;
  const HeadNorms norms = {.dtype = DType::kBf16, .q_C = &weight};
  EXPECT_EQ(Rotary(rows, norms, {}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RotaryBackward(rows, norms, {}, nullptr), cudaErrorInvalidValue);
  rows.q.num_heads = int64_t{1} << 28;
  EXPECT_EQ(Rotary(rows, {}, {}, nullptr), cudaErrorInvalidValue);
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaRotaryTest,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

}  // namespace
}  // namespace weft::kernels::cuda
