// Times kernels and the ATen code that they replace, on one thread and in the
// same run. Only times of the same run are comparable. ctest does not run this
// bench. To run it:
//   ninja kernel_bench && tests/bench/kernels/kernel_bench
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kRows = 512;
constexpr int64_t kFeatures = 576;
constexpr int64_t kFeedForward = 1536;
constexpr int64_t kVocab = 49152;
constexpr int64_t kVocabRows = 64;
constexpr int64_t kParameters = 4880000;

void CountBytes(benchmark::State& state, int64_t floats) {
  state.SetBytesProcessed(state.iterations() * floats * 4);
}

void RmsNormKernel(benchmark::State& state) {
  const at::Tensor x = at::randn({kRows, kFeatures}), w = at::randn(kFeatures);
  at::Tensor y = at::empty_like(x);
  for (auto _ : state) {
    for (int64_t r = 0; r < kRows; ++r) {
      Kernels().rms_norm_row(x.const_data_ptr<float>() + r * kFeatures,
                             w.const_data_ptr<float>(), kFeatures, 1e-5F,
                             y.mutable_data_ptr<float>() + r * kFeatures);
    }
    benchmark::ClobberMemory();
  }
  CountBytes(state, 2 * kRows * kFeatures);
}
BENCHMARK(RmsNormKernel);

void RmsNormAten(benchmark::State& state) {
  const at::Tensor x = at::randn({kRows, kFeatures}), w = at::randn(kFeatures);
  for (auto _ : state) {
    const at::Tensor y = x * (x.square().mean(1, true) + 1e-5).rsqrt() * w;
    benchmark::DoNotOptimize(y.const_data_ptr());
  }
  CountBytes(state, 2 * kRows * kFeatures);
}
BENCHMARK(RmsNormAten);

void SwiGluKernel(benchmark::State& state) {
  const at::Tensor x = at::randn({kRows, 2 * kFeedForward});
  at::Tensor y = at::empty({kRows, kFeedForward});
  for (auto _ : state) {
    for (int64_t r = 0; r < kRows; ++r) {
      const float* row = x.const_data_ptr<float>() + r * 2 * kFeedForward;
      Kernels().swiglu_row(row, row + kFeedForward, kFeedForward,
                           y.mutable_data_ptr<float>() + r * kFeedForward);
    }
    benchmark::ClobberMemory();
  }
  CountBytes(state, 3 * kRows * kFeedForward);
}
BENCHMARK(SwiGluKernel);

void SwiGluAten(benchmark::State& state) {
  const at::Tensor x = at::randn({kRows, 2 * kFeedForward});
  for (auto _ : state) {
    const at::Tensor y = at::silu(x.narrow(1, 0, kFeedForward)) *
                         x.narrow(1, kFeedForward, kFeedForward);
    benchmark::DoNotOptimize(y.const_data_ptr());
  }
  CountBytes(state, 3 * kRows * kFeedForward);
}
BENCHMARK(SwiGluAten);

// With argument 1, the kernel also overwrites the logits with their softmax.
// The next iteration uses the softmax as logits, which takes the same time.
void VocabRowKernel(benchmark::State& state) {
  at::Tensor logits = at::randn({kVocabRows, kVocab});
  const int64_t target = 7;
  float logprob = 0, entropy = 0;
  const VocabRowOptions options{.write_softmax = state.range(0) == 1};
  for (auto _ : state) {
    for (int64_t r = 0; r < kVocabRows; ++r) {
      Kernels().vocab_row(logits.mutable_data_ptr<float>() + r * kVocab, kVocab,
                          options, &target, 1, &logprob, &entropy);
    }
    benchmark::ClobberMemory();
  }
  CountBytes(state, kVocabRows * kVocab);
}
BENCHMARK(VocabRowKernel)->Arg(0)->Arg(1);

void VocabRowAten(benchmark::State& state) {
  const at::Tensor logits = at::randn({kVocabRows, kVocab});
  for (auto _ : state) {
    const at::Tensor log_p = logits.log_softmax(1);
    const at::Tensor p = log_p.exp();
    const at::Tensor entropy = -(p * log_p).sum(1);
    benchmark::DoNotOptimize(entropy.const_data_ptr());
  }
  CountBytes(state, kVocabRows * kVocab);
}
BENCHMARK(VocabRowAten);

void AdamWKernel(benchmark::State& state) {
  at::Tensor w = at::randn(kParameters), m = at::zeros(kParameters),
             v = at::zeros(kParameters);
  const at::Tensor g = at::randn(kParameters);
  const AdamWScalars scalars{.beta1 = 0.9F,
                             .one_minus_beta1 = 0.1F,
                             .beta2 = 0.95F,
                             .one_minus_beta2 = 0.05F,
                             .step_size = 1e-4F,
                             .eps = 1e-12F};
  for (auto _ : state) {
    Kernels().adamw(scalars, kParameters, w.const_data_ptr<float>(),
                    g.const_data_ptr<float>(), m.mutable_data_ptr<float>(),
                    v.mutable_data_ptr<float>(), w.mutable_data_ptr<float>());
  }
  CountBytes(state, 7 * kParameters);
}
BENCHMARK(AdamWKernel);

void AdamWAten(benchmark::State& state) {
  at::Tensor w = at::randn(kParameters), m = at::zeros(kParameters),
             v = at::zeros(kParameters);
  const at::Tensor g = at::randn(kParameters);
  for (auto _ : state) {
    m.mul_(0.9).add_(g, 0.1);
    v.mul_(0.95).addcmul_(g, g, 0.05);
    w.addcdiv_(m, v.sqrt().add_(1e-12), -1e-4);
  }
  CountBytes(state, 7 * kParameters);
}
BENCHMARK(AdamWAten);

// Returns the kernel's argument for the product of x [rows, kFeatures] with a
// weight [kVocab, kFeatures]. In f32, the weight has 113 MB. The benches below
// take the number of rows as their argument.
RowProduct FewRows(const at::Tensor& x, at::Tensor& y) {
  return {.x_BI = x.const_data_ptr<float>(),
          .x_stride = kFeatures,
          .num_rows = x.size(0),
          .num_inputs = kFeatures,
          .weight_stride = kFeatures,
          .y_BO = y.mutable_data_ptr<float>(),
          .y_stride = kVocab,
          .begin = 0,
          .end = kVocab};
}

void RowProductF32Kernel(benchmark::State& state) {
  const at::Tensor x = at::randn({state.range(0), kFeatures});
  const at::Tensor weight = at::randn({kVocab, kFeatures});
  at::Tensor y = at::empty({state.range(0), kVocab});
  for (auto _ : state) {
    Kernels().row_product_f32(FewRows(x, y), weight.const_data_ptr<float>());
  }
  CountBytes(state, kVocab * kFeatures);
}
BENCHMARK(RowProductF32Kernel)->Arg(1)->Arg(8)->Arg(32);

// Counts bytes as if the weight were f32, so that the rates are comparable with
// those of RowProductF32Kernel.
void RowProductBf16Kernel(benchmark::State& state) {
  const at::Tensor x = at::randn({state.range(0), kFeatures});
  const at::Tensor weight =
      at::randn({kVocab, kFeatures}).to(at::kBFloat16).view(at::kShort);
  at::Tensor y = at::empty({state.range(0), kVocab});
  for (auto _ : state) {
    Kernels().row_product_bf16(
        FewRows(x, y),
        reinterpret_cast<const uint16_t*>(weight.const_data_ptr<int16_t>()));
  }
  CountBytes(state, kVocab * kFeatures);
}
BENCHMARK(RowProductBf16Kernel)->Arg(1)->Arg(8)->Arg(32);

void FewRowsAten(benchmark::State& state) {
  const at::Tensor x = at::randn({state.range(0), kFeatures});
  const at::Tensor weight = at::randn({kVocab, kFeatures});
  at::Tensor y = at::empty({state.range(0), kVocab});
  for (auto _ : state) at::mm_out(y, x, weight.t());
  CountBytes(state, kVocab * kFeatures);
}
BENCHMARK(FewRowsAten)->Arg(1)->Arg(8)->Arg(32);

}  // namespace
}  // namespace weft::kernels::cpu

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
