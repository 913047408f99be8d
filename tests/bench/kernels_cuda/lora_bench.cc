// Times the adapters' products. Compares them with a copy of the bytes that
// they must move, and with the products of the base model.
#include <cstdint>
#include <vector>

#include "tests/bench/kernels_cuda/bench.h"
#include "tests/bench/kernels_cuda/lora_problem.h"

namespace weft::kernels::cuda::bench {
namespace {

void BenchProblem(const Device& device, int64_t num_adapters,
                  const std::vector<int64_t>& ranks) {
  // Each problem has new activations, because runs add to Y and dX. Otherwise Y
  // and dX would grow from problem to problem and widen the tolerance.
  const LoraActivations activations;
  const LoraProblem problem(activations, num_adapters, ranks);
  problem.CheckResults();
  for (const LoraStep step : kLoraSteps) {
    Line line("lora");
    line.Add("step", NameOf(step)).Add("adapters", num_adapters);
    if (ranks.size() == 1) {
      line.Add("rank", ranks.front());
    } else {
      line.Add("rank", "mixed");
    }
    line.AddBytes(device, problem.NumBytes(step), [&] { problem.Run(step); })
        .Print();
  }
}

// Computes y = x W^T and dx = dy W.
void RunBase(const Device& device, const Bf16Buffer& weight,
             const LoraActivations& activations) {
  Gemm gemm = {.m = kLoraRows,
               .n = kLoraWidth,
               .k = kLoraWidth,
               .a = {activations.x.data(), kLoraWidth},
               .b = {weight.data(), kLoraWidth, /*transposed=*/true},
               .c = activations.y.data(),
               .c_stride = kLoraWidth};
  RunGemm(device, gemm);
  gemm.a.data = activations.dy.data();
  gemm.b.transposed = false;
  gemm.c = activations.dx.data();
  RunGemm(device, gemm);
}

}  // namespace

void BenchLora(const Device& device) {
  for (const std::vector<int64_t>& ranks :
       std::vector<std::vector<int64_t>>{{8}, {16}, {64}, {8, 16, 32, 64}}) {
    for (const int64_t num_adapters : {1, 8, 64, 512}) {
      if (num_adapters < static_cast<int64_t>(ranks.size())) continue;
      BenchProblem(device, num_adapters, ranks);
    }
  }
}

void BenchLoraAddOn(const Device& device) {
  constexpr int64_t kAdapters = 64;
  constexpr int64_t kRank = 16;
  const LoraActivations activations;
  const Bf16Buffer weight(kLoraWidth * kLoraWidth);
  const LoraProblem problem(activations, kAdapters, {kRank});
  problem.CheckResults();
  const double base =
      device.Seconds([&] { RunBase(device, weight, activations); });
  const double with_adapters = device.Seconds([&] {
    RunBase(device, weight, activations);
    for (const LoraStep step : kLoraSteps) problem.Run(step);
  });
  Line("lora_add_on")
      .Add("adapters", kAdapters)
      .Add("rank", kRank)
      .AddTime("time", with_adapters)
      .AddTime("base_time", base)
      .AddRatio("of_base", with_adapters / base)
      .AddRatio("target", 1.25)
      .Print();
}

}  // namespace weft::kernels::cuda::bench
