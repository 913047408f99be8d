#include "tests/bench/kernels_cuda/lora_problem.h"

#include <algorithm>

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t N = kLoraRows;
constexpr int64_t K = kLoraWidth;

// The slots of the layer's A and B in the table.
constexpr int64_t kSlotOfA = 0;
constexpr int64_t kSlotOfB = 1;

bool IsOfA(LoraStep step) {
  return step == LoraStep::kShrink || step == LoraStep::kInputGradient ||
         step == LoraStep::kGradientOfA;
}

}  // namespace

const char* NameOf(LoraStep step) {
  switch (step) {
    case LoraStep::kShrink:
      return "shrink";
    case LoraStep::kExpand:
      return "expand";
    case LoraStep::kShrunkGradient:
      return "dS";
    case LoraStep::kInputGradient:
      return "dX";
    case LoraStep::kGradientOfA:
      return "dA";
    case LoraStep::kGradientOfB:
      return "dB";
  }
  return "";
}

LoraProblem::LoraProblem(const LoraActivations& activations,
                         int64_t num_adapters,
                         const std::vector<int64_t>& ranks)
    : activations_(activations), rows_each_(N / num_adapters) {
  int64_t num_parameters = 0;
  for (int64_t i = 0; i < num_adapters; ++i) {
    const int64_t rank = ranks[static_cast<size_t>(i) % ranks.size()];
    adapters_.push_back({.rank = rank, .offset = num_parameters});
    num_parameters += 2 * rank * K;
    total_rank_ += rank;
    max_rank_ = std::max(max_rank_, rank);
  }
  weights_ = std::make_unique<Bf16Buffer>(num_parameters);
  gradients_ = std::make_unique<FloatBuffer>(num_parameters);
  s_ = std::make_unique<Bf16Buffer>(N * max_rank_);
  ds_ = std::make_unique<Bf16Buffer>(N * max_rank_);
  MakeTable(ranks);
}

void LoraProblem::MakeTable(const std::vector<int64_t>& ranks) {
  LoraTableBuilder builder(2);
  for (const int64_t rank : ranks) {
    const LoraMatrix a = {.rank = static_cast<int32_t>(rank)};
    LoraMatrix b = a;
    b.offset = rank * K;
    b.scale = kLoraScale;
    builder.AddLayout({a, b});
  }
  for (size_t i = 0; i < adapters_.size(); ++i) {
    builder.AddSegment(static_cast<int64_t>(i) * rows_each_, rows_each_,
                       static_cast<int>(i % ranks.size()),
                       weights_->data() + adapters_[i].offset,
                       gradients_->data() + adapters_[i].offset);
  }
  table_bytes_ = std::make_unique<Buffer<std::byte>>(builder.Finish());
  table_ = builder.At(table_bytes_->data());
  int64_t num_floats = 1, num_counters = 1;
  for (const LoraStep step : kLoraSteps) {
    const LoraProduct product = Product(step);
    num_floats = std::max({num_floats, LoraShrinkWorkspace(product),
                           LoraGradientWorkspace(product)});
    num_counters = std::max(num_counters, LoraCounters(product));
  }
  workspace_ = std::make_unique<FloatBuffer>(num_floats);
  counters_ = std::make_unique<Buffer<unsigned>>(
      std::vector<unsigned>(static_cast<size_t>(num_counters)));
}

LoraProduct LoraProblem::Product(LoraStep step) const {
  const bool of_a = IsOfA(step);
  // The steps of A (its products and its gradient) read X, except
  // kInputGradient, which adds to dX. The steps of B read dY, except kExpand,
  // which adds to Y.
  const Bf16Buffer& features =
      of_a ? (step == LoraStep::kInputGradient ? activations_.dx
                                               : activations_.x)
           : (step == LoraStep::kExpand ? activations_.y : activations_.dy);
  const bool reads_s = step == LoraStep::kShrink || step == LoraStep::kExpand ||
                       step == LoraStep::kGradientOfB;
  return {
      .table = table_,
      .order = of_a ? LoraOrder::kRankByFeatures : LoraOrder::kFeaturesByRank,
      .projections = {{.slot = of_a ? kSlotOfA : kSlotOfB, .features = K}},
      .num_projections = 1,
      .max_rank = max_rank_,
      .features_TF = features.data(),
      .features_stride = K,
      .shrunk_TR = (reads_s ? *s_ : *ds_).data(),
      .shrunk_stride = max_rank_,
      .workspace = workspace_ == nullptr ? nullptr : workspace_->data(),
      .counters = counters_ == nullptr ? nullptr : counters_->data()};
}

void LoraProblem::Run(LoraStep step) const {
  const LoraProduct product = Product(step);
  switch (step) {
    case LoraStep::kShrink:
    case LoraStep::kShrunkGradient:
      return Check(RunLoraShrink(product, nullptr));
    case LoraStep::kExpand:
    case LoraStep::kInputGradient:
      return Check(RunLoraExpand(product, nullptr));
    case LoraStep::kGradientOfA:
    case LoraStep::kGradientOfB:
      return Check(AddLoraGradient(product, nullptr));
  }
}

double LoraProblem::NumShrunk() const {
  // Every adapter has the same number of rows.
  return static_cast<double>(total_rank_ * rows_each_);
}

double LoraProblem::NumBytes(LoraStep step) const {
  const double features = 2.0 * N * K + 2 * NumShrunk();
  const auto num_weights = static_cast<double>(total_rank_ * K);
  switch (step) {
    case LoraStep::kShrink:
    case LoraStep::kShrunkGradient:
      return features + 2 * num_weights;
    case LoraStep::kExpand:
    case LoraStep::kInputGradient:
      return features + 2.0 * N * K + 2 * num_weights;
    case LoraStep::kGradientOfA:
    case LoraStep::kGradientOfB:
      return features + 8 * num_weights;
  }
  return 0;
}

}  // namespace weft::kernels::cuda::bench
