// Times LoRA's products on panels, including the copies to panels, and ATen's
// products of the same operands. Items are floating-point operations. The
// arguments of a bench are rows, features and rank.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <algorithm>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {
namespace {

// The most rows that one call of panel_product processes: kBlockRows in
// ShrinkPanels, kWrittenRows in ExpandPanels, kSummedRows in GradientPanels.
constexpr int64_t kBlockRows = 64;
constexpr int64_t kWrittenRows = 8;
constexpr int64_t kSummedRows = 128;

struct Operands {
  int64_t rows, features, rank;
  at::Tensor features_TF, shrunk_TR, weight_RF, gradient_RF, panels;

  explicit Operands(const benchmark::State& state)
      : rows(state.range(0)),
        features(state.range(1)),
        rank(state.range(2)),
        features_TF(at::randn({rows, features})),
        shrunk_TR(at::randn({rows, rank}) * 1e-3),
        weight_RF(at::randn({rank, features})),
        gradient_RF(at::zeros({rank, features})),
        panels(at::empty({std::max(PanelFloats(features, rank),
                                   PanelFloats(rank, features))})) {}

  [[nodiscard]] float* Row(const at::Tensor& tensor, int64_t row) const {
    return tensor.mutable_data_ptr<float>() + row * tensor.stride(0);
  }
};

void CountOperations(benchmark::State& state, const Operands& o) {
  state.SetItemsProcessed(state.iterations() * 2 * o.rows * o.features *
                          o.rank);
}

// Times x A^T. The product dy B has the same form, so it is not timed.
void ShrinkPanels(benchmark::State& state) {
  const Operands o(state);
  for (auto _ : state) {
    Kernels().copy_panels({.from_KN = o.Row(o.weight_RF, 0),
                           .k_stride = 1,
                           .n_stride = o.features,
                           .num_terms = o.features,
                           .num_columns = o.rank,
                           .panels = o.Row(o.panels, 0)});
    for (int64_t row = 0; row < o.rows; row += kBlockRows) {
      Kernels().panel_product({.left_MK = o.Row(o.features_TF, row),
                               .m_stride = o.features,
                               .right_KN = o.Row(o.panels, 0),
                               .num_rows = std::min(kBlockRows, o.rows - row),
                               .num_terms = o.features,
                               .num_columns = o.rank,
                               .out_MN = o.Row(o.shrunk_TR, row),
                               .out_stride = o.rank});
    }
    benchmark::ClobberMemory();
  }
  CountOperations(state, o);
}

void ShrinkAten(benchmark::State& state) {
  Operands o(state);
  for (auto _ : state) at::mm_out(o.shrunk_TR, o.features_TF, o.weight_RF.t());
  CountOperations(state, o);
}

// Times dx += ds A. The update y += s B^T has the same form, so it is not
// timed.
void ExpandPanels(benchmark::State& state) {
  const Operands o(state);
  for (auto _ : state) {
    Kernels().copy_panels({.from_KN = o.Row(o.weight_RF, 0),
                           .k_stride = o.features,
                           .num_terms = o.rank,
                           .num_columns = o.features,
                           .panels = o.Row(o.panels, 0)});
    for (int64_t row = 0; row < o.rows; row += kWrittenRows) {
      Kernels().panel_product({.left_MK = o.Row(o.shrunk_TR, row),
                               .m_stride = o.rank,
                               .right_KN = o.Row(o.panels, 0),
                               .num_rows = std::min(kWrittenRows, o.rows - row),
                               .num_terms = o.rank,
                               .num_columns = o.features,
                               .adds = true,
                               .out_MN = o.Row(o.features_TF, row),
                               .out_stride = o.features});
    }
    benchmark::ClobberMemory();
  }
  CountOperations(state, o);
}

void ExpandAten(benchmark::State& state) {
  const Operands o(state);
  for (auto _ : state) o.features_TF.addmm_(o.shrunk_TR, o.weight_RF);
  CountOperations(state, o);
}

// Times dA += ds^T x. The gradient dB has the same form, so it is not timed.
void GradientPanels(benchmark::State& state) {
  const Operands o(state);
  for (auto _ : state) {
    for (int64_t row = 0; row < o.rows; row += kSummedRows) {
      Kernels().panel_product({.left_MK = o.Row(o.shrunk_TR, row),
                               .m_stride = 1,
                               .k_stride = o.rank,
                               .right_KN = o.Row(o.features_TF, row),
                               .right_stride = o.features,
                               .num_rows = o.rank,
                               .num_terms = std::min(kSummedRows, o.rows - row),
                               .num_columns = o.features,
                               .adds = true,
                               .out_MN = o.Row(o.gradient_RF, 0),
                               .out_stride = o.features});
    }
    benchmark::ClobberMemory();
  }
  CountOperations(state, o);
}

void GradientAten(benchmark::State& state) {
  const Operands o(state);
  for (auto _ : state) o.gradient_RF.addmm_(o.shrunk_TR.t(), o.features_TF);
  CountOperations(state, o);
}

void Shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgsProduct(
      {{4096, 512, 64, 33}, {576, 960, 1536, 3072}, {8, 16, 32, 64}});
}
BENCHMARK(ShrinkPanels)->Apply(Shapes);
BENCHMARK(ShrinkAten)->Apply(Shapes);
BENCHMARK(ExpandPanels)->Apply(Shapes);
BENCHMARK(ExpandAten)->Apply(Shapes);
BENCHMARK(GradientPanels)->Apply(Shapes);
BENCHMARK(GradientAten)->Apply(Shapes);

}  // namespace
}  // namespace weft::kernels::cpu
