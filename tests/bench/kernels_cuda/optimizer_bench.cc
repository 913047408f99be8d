// Times the optimizer's passes over an adapter's flat buffers.
#include <cstdint>
#include <vector>

#include "kernels/cuda/adamw.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t kParameters = int64_t{1} << 26;
constexpr int64_t kChecked = 1000;

std::vector<double> Widened(const FloatBuffer& buffer) {
  const std::vector<float> floats = buffer.Read(0, kChecked);
  return {floats.begin(), floats.end()};
}

void BenchAdamW(const Device& device) {
  const FloatBuffer w(kParameters), g(kParameters);
  // The moments are m = g and v = g^2, so that m is 0 wherever v is 0. With
  // another m, the update would divide a nonzero m by almost 0 where v is 0.
  std::vector<float> squares = g.Read(0, kParameters);
  const FloatBuffer m(squares);
  for (float& x : squares) x *= x;
  const FloatBuffer v(squares);
  const cpu::AdamWScalars scalars = {.beta1 = 0.9F,
                                     .one_minus_beta1 = 0.1F,
                                     .beta2 = 0.95F,
                                     .one_minus_beta2 = 0.05F,
                                     .step_size = 1e-4F,
                                     .eps = 1e-12F};
  const auto run = [&] {
    Check(AdamW(scalars, kParameters, w.data(), g.data(), m.data(), v.data(),
                w.data(), nullptr));
  };
  const cpu::reference::AdamWState expected = cpu::reference::AdamW(
      scalars,
      {.weights = Widened(w), .moment1 = Widened(m), .moment2 = Widened(v)},
      g.Read(0, kChecked));
  run();
  const std::vector<float> weights = w.Read(0, kChecked);
  for (size_t i = 0; i < weights.size(); ++i) {
    CheckNear(weights[i], expected.weights[i], kEpsilonF32, 4, 1, "AdamW");
  }
  Line("AdamW").AddBytes(device, 28.0 * kParameters, run).Print();
}

void BenchSumOfSquares(const Device& device) {
  const FloatBuffer x(kParameters);
  const Buffer<double> partials(std::vector<double>(
      static_cast<size_t>(SumOfSquaresPartials(kParameters))));
  const auto run = [&] {
    Check(SumOfSquares(x.data(), kParameters, partials.data(), nullptr));
  };
  run();
  double expected = 0;
  for (const double value : x.Read(0, kParameters)) expected += value * value;
  CheckNear(partials.Read(0, 1)[0], expected, kEpsilonF32, 1, 1,
            "SumOfSquares");
  Line("SumOfSquares").AddBytes(device, 4.0 * kParameters, run).Print();
}

}  // namespace

void BenchOptimizer(const Device& device) {
  BenchAdamW(device);
  BenchSumOfSquares(device);
}

}  // namespace weft::kernels::cuda::bench
