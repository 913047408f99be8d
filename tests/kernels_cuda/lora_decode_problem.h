// Adapters, rows and parts of S = x A^T for the tests of
// kernels/cuda/lora_decode.h.
#ifndef WEFT_TESTS_KERNELS_CUDA_LORA_DECODE_PROBLEM_H_
#define WEFT_TESTS_KERNELS_CUDA_LORA_DECODE_PROBLEM_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/lora_decode.h"
#include "kernels/cuda/lora_table_builder.h"
#include "tests/kernels_cuda/device_array.h"

namespace weft::kernels::cuda {

// The ranks of an adapter's matrices in one launch: the B of each projection in
// the group that the launch expands, and the A of the next group. Rank 0 means
// that the adapter lacks the matrix.
struct DecodeLayout {
  std::vector<int32_t> ranks_of_b;
  int32_t rank_of_a = 0;
};

struct DecodeSegment {
  int64_t begin = 0;
  int64_t end = 0;
  int layout = kNoLoraLayout;
  uint32_t seed = 0;  // The seed of the adapter's weights.
};

// What the kernels read about the adapters of all rows. Slot 0 is the A, and
// slot 1 + p is the B of projection p.
struct DecodeProblem {
  std::vector<int64_t> features;  // One for each projection.
  int64_t inputs = 0;             // The number of A's inputs.
  std::vector<DecodeLayout> layouts;
  std::vector<DecodeSegment> segments;  // They cover all rows.
  int64_t num_rows = 0;
  // The bf16 arrays of a launch, and the first matrix of its weights, begin
  // this many elements after an aligned address.
  int64_t shift = 0;

  [[nodiscard]] std::vector<LoraMatrix> SlotsOf(
      const DecodeLayout& layout) const {
    constexpr float kScales[] = {2, -1, 0.5F};
    std::vector<LoraMatrix> slots(1 + features.size());
    slots[0] = {.offset = shift, .rank = layout.rank_of_a};
    int64_t offset = shift + layout.rank_of_a * inputs;
    int32_t column = 0;
    for (size_t p = 0; p < features.size(); ++p) {
      slots[1 + p] = {.offset = offset,
                      .rank = layout.ranks_of_b[p],
                      .column = column,
                      .scale = kScales[p]};
      column += layout.ranks_of_b[p];
      offset += layout.ranks_of_b[p] * features[p];
    }
    return slots;
  }
  [[nodiscard]] std::vector<float> WeightsOf(
      const DecodeSegment& segment) const {
    const auto slots = SlotsOf(layouts[segment.layout]);
    const LoraMatrix& last = slots.back();
    return Rounded(DType::kBf16,
                   RandomFloats(last.offset + last.rank * features.back() + 1,
                                segment.seed, 0.1F));
  }
  [[nodiscard]] const DecodeSegment& SegmentOf(int64_t row) const {
    return *std::ranges::find_if(segments, [&](const DecodeSegment& segment) {
      return row < segment.end;
    });
  }
  [[nodiscard]] int64_t MaxRankOfA() const {
    int64_t most = 0;
    for (const DecodeLayout& layout : layouts) {
      most = std::max<int64_t>(most, layout.rank_of_a);
    }
    return most;
  }
  // Sums the ranks of B in each layout, and returns the largest sum.
  [[nodiscard]] int64_t MaxRankOfB() const {
    int64_t most = 0;
    for (const DecodeLayout& layout : layouts) {
      int64_t sum = 0;
      for (const int32_t rank : layout.ranks_of_b) sum += rank;
      most = std::max(most, sum);
    }
    return most;
  }
};

// The problem on the device. The table has room for more than the batch.
class DecodeAdapters {
 public:
  static constexpr int kParts = 5;

  explicit DecodeAdapters(const DecodeProblem& problem)
      : of_(problem),
        capacity_({.num_slots = 1 + static_cast<int64_t>(of_.features.size()),
                   .max_layouts = 1 + static_cast<int64_t>(of_.layouts.size()),
                   .max_rows = of_.num_rows + 2}),
        parts_(WholeNumbers()),
        parts_device_(parts_) {
    LoraTableBuilder builder(capacity_.num_slots);
    for (const DecodeLayout& layout : of_.layouts) {
      slots_.push_back(of_.SlotsOf(layout));
      builder.AddLayout(slots_.back());
    }
    for (const DecodeSegment& s : of_.segments) {
      weights_.push_back(s.layout == kNoLoraLayout ? std::vector<float>(1)
                                                   : of_.WeightsOf(s));
      device_.push_back(
          std::make_unique<DeviceArray>(DType::kBf16, weights_.back()));
      if (s.layout == kNoLoraLayout) {
        builder.AddBaseRows(s.begin, s.end - s.begin);
      } else {
        builder.AddFewRows(s.begin, s.end - s.begin, s.layout,
                           device_.back()->data());
      }
    }
    // The bytes behind the batch are 0xFF. The kernels must not read them.
    std::vector<std::byte> bytes(capacity_.num_bytes(), std::byte{0xFF});
    builder.WriteTo(capacity_, bytes);
    bytes_ = std::make_unique<DeviceBuffer<std::byte>>(bytes);
  }

  [[nodiscard]] const DecodeProblem& of() const { return of_; }
  [[nodiscard]] LoraTable table() const { return capacity_.At(bytes_->data()); }
  [[nodiscard]] LoraParts shrunk() const {
    return {.data = parts_device_.data(), .count = kParts, .stride = stride_};
  }
  // Returns element `feature` of scale * S B^T for a row and a projection.
  [[nodiscard]] double Expanded(int64_t row, size_t projection,
                                int64_t feature) const {
    const LoraMatrix b = MatrixOf(row, 1 + projection);
    double sum = 0;
    for (int64_t r = 0; r < b.rank; ++r) {
      sum += Shrunk(row, b.column + r) *
             WeightAt(row, b.offset + feature * b.rank + r);
    }
    return b.scale * sum;
  }
  // Returns the sum of the terms of x A^T at one rank over the features [first,
  // end) of a row x.
  [[nodiscard]] double ShrunkPart(int64_t row, const float* x, int64_t rank,
                                  int64_t first, int64_t end) const {
    const LoraMatrix a = MatrixOf(row, 0);
    double sum = 0;
    for (int64_t i = first; i < std::min(end, of_.inputs); ++i) {
      sum += static_cast<double>(x[i]) *
             WeightAt(row, a.offset + rank * of_.inputs + i);
    }
    return sum;
  }
  [[nodiscard]] int32_t RankOfA(int64_t row) const {
    return MatrixOf(row, 0).rank;
  }

 private:
  // Makes parts whose sums are whole numbers below 16, so that rounding S
  // changes nothing.
  [[nodiscard]] std::vector<float> WholeNumbers() const {
    std::vector<float> parts = RandomFloats(of_.num_rows * kParts * stride_, 3);
    for (float& x : parts) x = std::clamp(std::round(x), -3.0F, 3.0F);
    return parts;
  }
  // Returns element (row, column) of S, which is the sum of its parts.
  [[nodiscard]] double Shrunk(int64_t row, int64_t column) const {
    double sum = 0;
    for (int64_t part = 0; part < kParts; ++part) {
      sum += parts_[(row * kParts + part) * stride_ + column];
    }
    return sum;
  }
  [[nodiscard]] LoraMatrix MatrixOf(int64_t row, size_t slot) const {
    const int layout = of_.SegmentOf(row).layout;
    if (layout == kNoLoraLayout) return {};
    return slots_[layout][slot];
  }
  [[nodiscard]] double WeightAt(int64_t row, int64_t at) const {
    return weights_[&of_.SegmentOf(row) - of_.segments.data()][at];
  }

  const DecodeProblem of_;
  const int stride_ = LoraPartStride(of_.MaxRankOfB());
  const LoraTableCapacity capacity_;
  const std::vector<float> parts_;
  DeviceBuffer<float> parts_device_;
  std::vector<std::vector<LoraMatrix>> slots_;  // The slots of each layout.
  std::vector<std::vector<float>> weights_;     // One for each segment.
  std::vector<std::unique_ptr<DeviceArray>> device_;
  std::unique_ptr<DeviceBuffer<std::byte>> bytes_;
};

// Makes rows of several adapters, rows of an adapter that lacks A and all B,
// and rows without an adapter. One segment has more rows than an entry of the
// table holds.
inline DecodeProblem MixedDecode(std::vector<int64_t> features, int64_t inputs,
                                 int64_t shift) {
  const size_t count = features.size();
  const auto ranks = [&](std::vector<int32_t> all) {
    all.resize(count);
    return all;
  };
  return {.features = std::move(features),
          .inputs = inputs,
          .layouts = {{.ranks_of_b = ranks({16, 8, 32}), .rank_of_a = 40},
                      {.ranks_of_b = ranks({0, 3, 0}), .rank_of_a = 5},
                      {.ranks_of_b = ranks({0, 0, 0}), .rank_of_a = 0},
                      {.ranks_of_b = ranks({128, 72, 4}), .rank_of_a = 32}},
          .segments = {{0, 1, 0, 11},
                       {1, 3, kNoLoraLayout, 0},
                       {3, 4, 1, 12},
                       {4, 6, 2, 13},
                       {6, 24, 3, 14},
                       {24, 25, kNoLoraLayout, 0}},
          .num_rows = 25,
          .shift = shift};
}

// One row of an adapter, as for a decoded token.
inline DecodeProblem OneRow(std::vector<int64_t> features, int64_t inputs,
                            int32_t rank_of_b, int32_t rank_of_a) {
  const size_t count = features.size();
  return {.features = std::move(features),
          .inputs = inputs,
          .layouts = {{.ranks_of_b = std::vector<int32_t>(count, rank_of_b),
                       .rank_of_a = rank_of_a}},
          .segments = {{0, 1, 0, 5}},
          .num_rows = 1};
}

// Makes more than twice as many items as a launch has blocks, so that each
// block computes several items in turn. Each row has its own entry of `tiles`
// tiles. Every fourth row has its own adapter.
inline DecodeProblem ManyItems(std::vector<int64_t> features, int64_t inputs,
                               int64_t tiles) {
  constexpr int64_t kMostBlocks = 264;
  const size_t count = features.size();
  DecodeProblem problem = {
      .features = std::move(features),
      .inputs = inputs,
      .layouts = {{.ranks_of_b = std::vector<int32_t>(count, 8),
                   .rank_of_a = 5}},
      .num_rows = (2 * kMostBlocks + 8) / tiles};
  for (int64_t row = 0; row < problem.num_rows; ++row) {
    problem.segments.push_back({.begin = row,
                                .end = row + 1,
                                .layout = row % 4 == 0 ? 0 : kNoLoraLayout,
                                .seed = static_cast<uint32_t>(row)});
  }
  return problem;
}

// Returns the same rows, but only `row` keeps its adapter, if it has one.
inline DecodeProblem WithBaseRowsAround(DecodeProblem problem, int64_t row) {
  DecodeSegment own = problem.SegmentOf(row);
  own.begin = row;
  own.end = row + 1;
  problem.segments = {own};
  if (row > 0) {
    problem.segments.insert(problem.segments.begin(),
                            DecodeSegment{.begin = 0, .end = row});
  }
  if (own.end < problem.num_rows) {
    problem.segments.push_back({.begin = own.end, .end = problem.num_rows});
  }
  return problem;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_TESTS_KERNELS_CUDA_LORA_DECODE_PROBLEM_H_
