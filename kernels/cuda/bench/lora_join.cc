#include "kernels/cuda/bench/lora_join.h"

#include <cmath>
#include <numeric>
#include <string>

#include "kernels/cuda/bench/bench.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr float kScale = 0.5F;
constexpr float kEps = 1e-5F;
constexpr int64_t kPositions = 1024;

// Returns small whole numbers, so that their sums are exact in any order.
std::vector<float> WholeNumbers(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7 % 5) - 2;
  }
  return values;
}

// Returns parts [rows, to, stride] with the same sums as `parts` [rows, from,
// stride]. The added parts are 0.
std::vector<float> Spread(const std::vector<float>& parts, int64_t rows,
                          int64_t from, int64_t to, int64_t stride) {
  std::vector<float> all(static_cast<size_t>(rows * to * stride));
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(parts.begin() + row * from * stride, from * stride,
                all.begin() + row * to * stride);
  }
  return all;
}

}  // namespace

JoinProblem::JoinProblem(const Join& join, const Batch& batch, int64_t rank)
    : join_(join),
      batch_(batch),
      rank_(rank),
      outputs_(std::accumulate(join.features.begin(), join.features.end(),
                               int64_t{0})),
      width_(join.kind == JoinKind::kGate ? outputs_ / 2 : outputs_),
      num_slots_(1 + static_cast<int64_t>(join.features.size())),
      num_layers_(ColdLayers(2 * batch.adapters * LayerElements())),
      weights_(num_layers_ * LayerElements() * batch.adapters, 0.05F),
      y_(batch.rows * outputs_),
      before_(batch.rows * outputs_),
      x_(batch.rows * width_),
      out_(batch.rows * width_),
      normed_(batch.rows * width_),
      weight_(width_),
      capacity_({.num_slots = num_layers_ * num_slots_,
                 .max_layouts = 1,
                 .max_rows = batch.rows}),
      table_(TableBytes()),
      separate_parts_(OwnParts()),
      joined_parts_(Spread(OwnParts(), batch.rows, SeparateCount(),
                           JoinedCount(), stride())),
      next_parts_(NextSize()),
      squares_(std::vector<float>(
          static_cast<size_t>(batch.rows * LoraResidualParts(4096)), 256)),
      k_pages_(batch.rows * 1024),
      v_pages_(batch.rows * 1024),
      cos_(kPositions * 64),
      sin_(kPositions * 64),
      positions_(Positions()),
      slots_(Slots()) {
  Check(cudaMemcpy(before_.data(), y_.data(),
                   static_cast<size_t>(batch.rows * outputs_) * 2,
                   cudaMemcpyDeviceToDevice));
}

std::vector<float> JoinProblem::OwnParts() const {
  return WholeNumbers(batch_.rows * SeparateCount() * stride());
}

std::vector<int32_t> JoinProblem::Positions() const {
  std::vector<int32_t> positions(static_cast<size_t>(batch_.rows));
  std::iota(positions.begin(), positions.end(), 100);
  return positions;
}

std::vector<int64_t> JoinProblem::Slots() const {
  std::vector<int64_t> slots(static_cast<size_t>(batch_.rows));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  return slots;
}

std::vector<std::byte> JoinProblem::TableBytes() const {
  std::vector<LoraMatrix> slots;
  const auto rank = static_cast<int32_t>(rank_);
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    int64_t offset = layer * LayerElements();
    slots.push_back(
        {.offset = offset, .rank = static_cast<int32_t>(next_rank())});
    offset += next_rank() * join_.next_inputs;
    int32_t column = 0;
    for (const int64_t features : join_.features) {
      slots.push_back(
          {.offset = offset, .rank = rank, .column = column, .scale = kScale});
      column += rank;
      offset += features * rank_;
    }
  }
  LoraTableBuilder builder(capacity_.num_slots);
  builder.AddLayout(slots);
  const int64_t each = batch_.rows / batch_.adapters;
  for (int64_t i = 0; i < batch_.adapters; ++i) {
    builder.AddFewRows(i * each, each, 0,
                       weights_.data() + i * num_layers_ * LayerElements());
  }
  std::vector<std::byte> bytes(capacity_.num_bytes());
  builder.WriteTo(capacity_, bytes);
  return bytes;
}

LoraFewRowsProduct JoinProblem::ExpandOf(int64_t layer) const {
  LoraFewRowsProduct product = {
      .table = capacity_.At(table_.data()),
      .max_rank = static_cast<int64_t>(join_.features.size()) * rank_,
      .num_projections = static_cast<int>(join_.features.size()),
      .max_projection_rank = rank_,
      .inputs = join_.inputs,
      .y_TO = y_.data(),
      .y_stride = outputs_,
      .workspace = separate_parts_.data()};
  int64_t column = 0;
  for (size_t p = 0; p < join_.features.size(); ++p) {
    product.projections[p] = {
        .slot = layer * num_slots_ + 1 + static_cast<int64_t>(p),
        .column = column,
        .features = join_.features[p]};
    column += join_.features[p];
  }
  return product;
}

LoraFewRowsProduct JoinProblem::ShrinkOf(int64_t layer,
                                         const Bf16Buffer& x) const {
  return {.table = capacity_.At(table_.data()),
          .slot_of_a = layer * num_slots_,
          .max_rank = next_rank(),
          .x_TI = x.data(),
          .x_stride = join_.next_inputs,
          .inputs = join_.next_inputs,
          .workspace = next_parts_.data()};
}

RotaryRows JoinProblem::Rotation() const {
  const auto heads = [&](int64_t column, int64_t count) {
    return HeadRows{.data = y_.data() + column,
                    .num_heads = count,
                    .token_stride = outputs_,
                    .head_stride = 128};
  };
  return {.dtype = DType::kBf16,
          .num_tokens = batch_.rows,
          .half_features = 64,
          .q = heads(0, 32),
          .k = heads(4096, 8),
          .positions_T = positions_.data(),
          .cos_PC = cos_.data(),
          .sin_PC = sin_.data()};
}

KvSlots JoinProblem::Pages() const {
  return {.v = {.data = y_.data() + 5120,
                .num_heads = 8,
                .token_stride = outputs_,
                .head_stride = 128},
          .slots_T = slots_.data(),
          .k_pages = k_pages_.data(),
          .v_pages = v_pages_.data()};
}

RmsNormRows JoinProblem::NormRows() const {
  return {.dtype = DType::kBf16,
          .weight_dtype = DType::kBf16,
          .num_rows = batch_.rows,
          .features = width_,
          .eps = kEps,
          .x_TD = x_.data(),
          .x_stride = width_,
          .weight_D = weight_.data()};
}

void JoinProblem::RunSeparate(int64_t layer, cudaStream_t stream) const {
  Check(RunLoraFewRowsExpand(ExpandOf(layer), stream));
  switch (join_.kind) {
    case JoinKind::kHeads:
      Check(Rotary(Rotation(), {}, Pages(), stream));
      break;
    case JoinKind::kGate:
      Check(GatedProduct(DType::kBf16, GateActivation::kSilu, batch_.rows,
                         width_, y_.data(), out_.data(), stream));
      Check(RunLoraFewRowsShrink(ShrinkOf(layer, out_), stream));
      break;
    case JoinKind::kResidual:
      Check(AddRmsNorm(NormRows(), y_.data(), width_, normed_.data(), width_,
                       stream));
      Check(RunLoraFewRowsShrink(ShrinkOf(layer, normed_), stream));
  }
}

void JoinProblem::RunJoined(int64_t layer, cudaStream_t stream) const {
  const LoraFewRowsProduct expand = ExpandOf(layer);
  const int64_t slot_of_a = layer * num_slots_;
  // Each row of squares_ adds up to 4096, so that the norm's factor is 1.
  const DeferredNorm norm = {.squares_TP = squares_.data(), .hidden = 4096};
  if (join_.kind == JoinKind::kHeads) {
    LoraHeads heads = {.table = expand.table,
                       .shrunk = JoinedParts(),
                       .norm = norm,
                       .rows = Rotation(),
                       .slots = Pages()};
    std::ranges::copy(expand.projections, heads.projections);
    Check(RunLoraHeads(heads, stream));
  } else if (join_.kind == JoinKind::kGate) {
    Check(RunLoraGate({.table = expand.table,
                       .slots_of_b = {slot_of_a + 1, slot_of_a + 2},
                       .slot_of_a = slot_of_a,
                       .features = width_,
                       .shrunk = JoinedParts(),
                       .norm = norm,
                       .gate_up_T2F = y_.data(),
                       .out_TF = out_.data(),
                       .down = NextParts()},
                      stream));
  } else {
    Check(RunLoraResidual({.table = expand.table,
                           .slot_of_b = slot_of_a + 1,
                           .slot_of_a = slot_of_a,
                           .hidden = width_,
                           .shrunk = JoinedParts(),
                           .y_TH = y_.data(),
                           .x_TH = x_.data(),
                           .sum_TH = y_.data(),
                           .weight_H = weight_.data(),
                           .scaled_TH = normed_.data(),
                           .squares_TP = squares_.data(),
                           .next = NextParts()},
                          stream));
  }
}

std::vector<float> JoinProblem::NextOf(int64_t row, int64_t count) const {
  const int64_t columns = LoraPartStride(next_rank());
  std::vector<float> sums(static_cast<size_t>(next_rank()));
  const auto parts = next_parts_.Read(row * count * columns, count * columns);
  for (int64_t i = 0; i < count * columns; ++i) {
    if (i % columns < next_rank()) sums[i % columns] += parts[i];
  }
  return sums;
}

void JoinProblem::CheckResults() const {
  const auto reset = [&] {
    Check(cudaMemcpy(y_.data(), before_.data(),
                     static_cast<size_t>(batch_.rows * outputs_) * 2,
                     cudaMemcpyDeviceToDevice));
  };
  const int64_t row = batch_.rows - 1;
  const bool is_heads = join_.kind == JoinKind::kHeads;
  const int64_t width = is_heads ? outputs_ : width_;
  const int64_t checked = is_heads ? 4096 : width;
  RunSeparate(0, nullptr);
  const auto expected = Result().Floats(row * width, checked);
  const auto k = k_pages_.Floats(row * 1024, 1024);
  const auto next =
      NextOf(row, is_heads ? 0 : LoraFewRowsParts(ShrinkOf(0, out_)).count);
  reset();
  RunJoined(0, nullptr);
  const auto actual = Result().Floats(row * width, checked);
  // The separate and the joined launches round at different places, so their
  // results may differ by rounding errors.
  const auto compare = [&](const std::vector<float>& a,
                           const std::vector<float>& b, double factor) {
    double largest = 1e-3;
    for (const float x : b) largest = std::max<double>(largest, std::abs(x));
    for (size_t i = 0; i < b.size(); ++i) {
      Check(std::abs(factor * a[i] - b[i]) <=
                4 * weft::testing::kEpsilonBf16 * largest,
            std::string(join_.name) + " differs from separate launches");
    }
  };
  compare(actual, expected, 1);
  if (is_heads) compare(k_pages_.Floats(row * 1024, 1024), k, 1);
  double factor = 1;
  if (join_.kind == JoinKind::kResidual) {
    double sum = 0;
    for (const float x : squares_.Read(row * 16, 16)) sum += x;
    factor = 1 / std::sqrt(sum / 4096 + kEps);
  }
  compare(NextOf(row, is_heads ? 0 : NextCount()), next, factor);
  reset();
}

}  // namespace weft::kernels::cuda::bench
