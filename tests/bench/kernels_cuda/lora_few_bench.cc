// Times LoRA's part of a decode step, and compares it with a copy that moves
// the same number of bytes. Replays a graph of layers whose matrices exceed the
// cache, so that each launch reads its matrices from memory. The times include
// the cost of a launch on the device, but not its cost on the host.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/lora/lora_few_rows.h"
#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr float kScale = 0.5F;

// A group: the projections of Llama-3.1-8B that have the same input.
struct Group {
  const char* name;
  int64_t inputs;
  std::vector<int64_t> features;
};
const std::vector<Group>& Groups() {
  static const std::vector<Group> groups = {{"qkv", 4096, {4096, 1024, 1024}},
                                            {"o", 4096, {4096}},
                                            {"gate_up", 4096, {14336, 14336}},
                                            {"down", 14336, {4096}}};
  return groups;
}

struct Batch {
  int64_t rows;
  int64_t adapters;
};
constexpr Batch kBatches[] = {{1, 1},   {8, 1},   {8, 8},   {64, 1},
                              {64, 64}, {256, 1}, {256, 64}};

// A decode step of num_layers() layers, each with the same group. Every adapter
// has the same number of rows.
class FewProblem {
 public:
  FewProblem(const Group& group, const Batch& batch, int64_t rank)
      : group_(group),
        batch_(batch),
        rank_(rank),
        outputs_(std::accumulate(group.features.begin(), group.features.end(),
                                 int64_t{0})),
        num_projections_(static_cast<int64_t>(group.features.size())),
        num_layers_(ColdLayers(2 * batch.adapters *
                               std::min(ElementsOfA(), ElementsOfB()))),
        weights_(num_layers_ * LayerElements() * batch.adapters),
        x_(batch.rows * group.inputs),
        y_(batch.rows * outputs_),
        shrunk_(batch.rows * all_ranks()),
        capacity_({.num_slots = num_layers_ * (1 + num_projections_),
                   .max_layouts = 1,
                   .max_rows = batch.rows}),
        table_(TableBytes()),
        workspace_(LoraFewRowsWorkspace(ProductOf(0))) {}

  // The A matrices of all layers together exceed the cache. So do their B
  // matrices.
  int64_t num_layers() const { return num_layers_; }
  void Shrink(int64_t layer, cudaStream_t stream) const {
    Check(RunLoraFewRowsShrink(ProductOf(layer), stream));
  }
  void Expand(int64_t layer, cudaStream_t stream) const {
    Check(RunLoraFewRowsExpand(ProductOf(layer), stream));
  }
  // Return the bytes that must move: the shrink reads A and x, and the
  // expansion reads B and y and writes y.
  double ShrinkBytes() const {
    return 2.0 * static_cast<double>(batch_.adapters * ElementsOfA() +
                                     batch_.rows * group_.inputs);
  }
  double ExpandBytes() const {
    return 2.0 * static_cast<double>(batch_.adapters * ElementsOfB() +
                                     2 * batch_.rows * outputs_);
  }
  // Compares some elements of the shrunk rows and of y with loops in f64.
  void CheckResults() const;

 private:
  // Returns the sum of the ranks of all projections.
  int64_t all_ranks() const { return num_projections_ * rank_; }
  // A layer has A [all_ranks(), inputs], then every B [features, rank_]. The
  // shrink reads A, and the expansion reads B.
  int64_t ElementsOfA() const { return all_ranks() * group_.inputs; }
  int64_t ElementsOfB() const { return rank_ * outputs_; }
  int64_t LayerElements() const { return ElementsOfA() + ElementsOfB(); }
  // Return the offset of a layer's A, or of a projection's B, in an adapter's
  // weights.
  int64_t OffsetOfA(int64_t layer) const { return layer * LayerElements(); }
  int64_t OffsetOfB(int64_t layer, size_t projection) const {
    return OffsetOfA(layer) + ElementsOfA() + ColumnOf(projection) * rank_;
  }
  int64_t ColumnOf(size_t projection) const {
    return std::accumulate(
        group_.features.begin(),
        group_.features.begin() + static_cast<int64_t>(projection), int64_t{0});
  }
  int64_t OffsetOfAdapter(int64_t row) const {
    return row / (batch_.rows / batch_.adapters) * num_layers_ *
           LayerElements();
  }
  std::vector<std::byte> TableBytes() const;
  LoraFewRowsProduct ProductOf(int64_t layer) const;
  void CheckRow(int64_t row, const std::vector<float>& y_before) const;

  const Group& group_;
  Batch batch_;
  int64_t rank_, outputs_, num_projections_, num_layers_;
  Bf16Buffer weights_, x_, y_, shrunk_;
  LoraTableCapacity capacity_;
  Buffer<std::byte> table_;
  FloatBuffer workspace_;
};

std::vector<std::byte> FewProblem::TableBytes() const {
  std::vector<LoraMatrix> slots;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    slots.push_back({.offset = OffsetOfA(layer),
                     .rank = static_cast<int32_t>(all_ranks())});
    for (size_t p = 0; p < group_.features.size(); ++p) {
      slots.push_back(
          {.offset = OffsetOfB(layer, p),
           .rank = static_cast<int32_t>(rank_),
           .column = static_cast<int32_t>(p) * static_cast<int32_t>(rank_),
           .scale = kScale});
    }
  }
  LoraTableBuilder builder(capacity_.num_slots);
  builder.AddLayout(slots);
  const int64_t each = batch_.rows / batch_.adapters;
  for (int64_t row = 0; row < batch_.rows; row += each) {
    builder.AddFewRows(row, each, 0, weights_.data() + OffsetOfAdapter(row));
  }
  std::vector<std::byte> bytes(capacity_.num_bytes());
  builder.WriteTo(capacity_, bytes);
  return bytes;
}

LoraFewRowsProduct FewProblem::ProductOf(int64_t layer) const {
  const int64_t slot = layer * (1 + num_projections_);
  LoraFewRowsProduct product = {
      .table = capacity_.At(table_.data()),
      .slot_of_a = slot,
      .max_rank = all_ranks(),
      .num_projections = static_cast<int>(num_projections_),
      .max_projection_rank = rank_,
      .x_TI = x_.data(),
      .x_stride = group_.inputs,
      .inputs = group_.inputs,
      .y_TO = y_.data(),
      .y_stride = outputs_,
      .shrunk_TR = shrunk_.data(),
      .shrunk_stride = all_ranks(),
      .workspace = workspace_.data()};
  for (size_t p = 0; p < group_.features.size(); ++p) {
    product.projections[p] = {.slot = slot + 1 + static_cast<int64_t>(p),
                              .column = ColumnOf(p),
                              .features = group_.features[p]};
  }
  return product;
}

void FewProblem::CheckRow(int64_t row,
                          const std::vector<float>& y_before) const {
  const auto dot = [](const std::vector<float>& a, const std::vector<float>& b,
                      double* largest) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      sum += static_cast<double>(a[i]) * b[i];
      *largest = std::max(*largest, std::abs(sum));
    }
    return sum;
  };
  const int64_t adapter = OffsetOfAdapter(row);
  const auto x = x_.Floats(row * group_.inputs, group_.inputs);
  const auto s = shrunk_.Floats(row * all_ranks(), all_ranks());
  for (int64_t r = 0; r < all_ranks(); r += all_ranks() - 1) {
    double largest = 0;
    const double expected =
        dot(x, weights_.Floats(adapter + r * group_.inputs, group_.inputs),
            &largest);
    CheckNear(s[static_cast<size_t>(r)], expected, kEpsilonBf16, group_.inputs,
              largest, "S of few rows");
  }
  const auto y = y_.Floats(row * outputs_, outputs_);
  for (size_t p = 0; p < group_.features.size(); ++p) {
    const auto begin = s.begin() + static_cast<int64_t>(p) * rank_;
    const std::vector<float> own(begin, begin + rank_);
    for (const int64_t f : {int64_t{0}, int64_t{77}, group_.features[p] - 1}) {
      const auto column = static_cast<size_t>(ColumnOf(p) + f);
      double largest = std::abs(y_before[column]);
      const double sum = dot(
          own, weights_.Floats(adapter + OffsetOfB(0, p) + f * rank_, rank_),
          &largest);
      CheckNear(y[column], y_before[column] + kScale * sum, kEpsilonBf16, rank_,
                largest, "y of few rows");
    }
  }
}

void FewProblem::CheckResults() const {
  std::vector<int64_t> rows = {0, batch_.rows / 2, batch_.rows - 1};
  std::vector<std::vector<float>> before;
  for (const int64_t row : rows) {
    before.push_back(y_.Floats(row * outputs_, outputs_));
  }
  Shrink(0, nullptr);
  Expand(0, nullptr);
  for (size_t i = 0; i < rows.size(); ++i) CheckRow(rows[i], before[i]);
}

void BenchProblem(const Device& device, const Group& group, const Batch& batch,
                  int64_t rank) {
  const FewProblem problem(group, batch, rank);
  problem.CheckResults();
  const double shrink = ReplaySeconds(problem.num_layers(),
                                      [&](int64_t layer, cudaStream_t stream) {
                                        problem.Shrink(layer, stream);
                                      });
  const double expand = ReplaySeconds(problem.num_layers(),
                                      [&](int64_t layer, cudaStream_t stream) {
                                        problem.Expand(layer, stream);
                                      });
  Line("lora_few")
      .Add("group", group.name)
      .Add("rows", batch.rows)
      .Add("adapters", batch.adapters)
      .Add("rank", rank)
      .AddTime("shrink", shrink)
      .AddTime("shrink_copy", problem.ShrinkBytes() / device.copy_rate())
      .AddTime("expand", expand)
      .AddTime("expand_copy", problem.ExpandBytes() / device.copy_rate())
      .Print();
}

}  // namespace

void BenchLoraFew(const Device& device) {
  for (const int64_t rank : {16, 32, 64}) {
    for (const Group& group : Groups()) {
      for (const Batch& batch : kBatches) {
        BenchProblem(device, group, batch, rank);
      }
    }
  }
}

}  // namespace weft::kernels::cuda::bench
