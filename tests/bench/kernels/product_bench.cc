// Times the products of a training step (src/ops/matmul.h) beside those of MKL
// (at::mm) and oneDNN. The sizes are SmolLM2's. The weights of a product take
// turns, so that they come from memory as in a model.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>

#include <optional>
#include <string_view>
#include <vector>

#include "src/ops/matmul.h"

namespace weft::ops {
namespace {

constexpr int64_t kRows = 1024;
constexpr int64_t kWeights = 8;

enum Product { kOurs, kMkl, kOneDnn };

at::Tensor OneDnn(const at::Tensor& a, const at::Tensor& weight) {
  static const auto linear =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, std::string_view,
                            c10::List<std::optional<at::Scalar>>,
                            std::optional<std::string_view>)>();
  return linear.call(a, weight, std::nullopt, "none",
                     c10::List<std::optional<at::Scalar>>(), std::nullopt);
}

at::Tensor Multiply(Product product, const at::Tensor& a, const at::Tensor& b) {
  if (product == kOurs) return MatMul(a, b);
  return product == kMkl ? at::mm(a, b) : OneDnn(a, b.t());
}

void CountFlops(benchmark::State& state, int64_t flops) {
  state.counters["flop/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * flops),
                         benchmark::Counter::kIsRate);
}

// Arguments: inputs and outputs of the weight. x W^T, or dy W if `backward`.
template <Product kProduct, bool kBackward>
void Products(benchmark::State& state) {
  const int64_t inputs = state.range(0), outputs = state.range(1);
  const at::Tensor a = at::randn({kRows, kBackward ? outputs : inputs});
  std::vector<at::Tensor> weights;
  for (int64_t i = 0; i < kWeights; ++i) {
    weights.push_back(at::randn({outputs, inputs}));
  }
  const auto operand = [&](int64_t i) {
    return kBackward ? weights[i] : weights[i].t();
  };
  const at::Tensor expected =
      at::mm(a.to(at::kDouble), operand(0).to(at::kDouble));
  TORCH_CHECK(at::allclose(Multiply(kProduct, a, operand(0)).to(at::kDouble),
                           expected, /*rtol=*/1e-4, /*atol=*/1e-3),
              "the product is wrong; its time means nothing");
  int64_t i = 0;
  for (auto _ : state) {
    const at::Tensor y = Multiply(kProduct, a, operand(i++ % kWeights));
    benchmark::DoNotOptimize(y.const_data_ptr());
  }
  CountFlops(state, 2 * kRows * inputs * outputs);
}

#define WEFT_PRODUCTS(product)                                               \
  BENCHMARK(Products<product, false>)->Args({576, 3072})->Args({1536, 576}); \
  BENCHMARK(Products<product, true>)->Args({576, 3072})->Args({1536, 576})
WEFT_PRODUCTS(kOurs);
WEFT_PRODUCTS(kMkl);
WEFT_PRODUCTS(kOneDnn);

}  // namespace
}  // namespace weft::ops
