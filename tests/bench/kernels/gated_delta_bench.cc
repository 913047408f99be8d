// Times the kernels of the gated delta rule on one thread, for one head with
// 128 features of keys and values, beside ATen's product of the same size as
// the largest of a chunk. Checks a chunk against steps first.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <cmath>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kC = kDeltaChunkRows;
constexpr int64_t kF = 128;

// The multiply-adds of a chunk's products, times 2: q and k with k^T and with
// the start state, the solve, W U, and k^T U.
constexpr double kForwardFlops =
    2.0 * kC * kF * (2 * kC + 2 * kF + kC / 2.0 + kC + kF);
// Those of the forward pass that are computed again, W^T dO, K dS1, the solve,
// dO and dR with U^T and S0^T, U dS1^T, three products [C, C] [C, K], and two
// for dS0.
constexpr double kBackwardFlops =
    2.0 * kC * kF *
    (2 * kC + kC + kF + kC / 2.0 + 2 * kC + 2 * kF + kF + 3 * kC + 2 * kF);

struct Chunk {
  at::Tensor q = at::randn({kC, kF}) / kF, k = at::randn({kC, kF}) / 11.3;
  at::Tensor v = at::randn({kC, kF}), dout = at::randn({kC, kF});
  at::Tensor beta = at::rand({kC}), g = -at::rand({kC});
  at::Tensor start = at::randn({kF, kF}), stop = at::randn({kF, kF});
  at::Tensor out = at::empty({kC, kF}), u = at::empty({kC, kF});
  at::Tensor dq = at::empty({kC, kF}), dk = at::empty({kC, kF});
  at::Tensor dv = at::empty({kC, kF});
  at::Tensor dbeta = at::empty({kC}), dg = at::empty({kC});
  at::Tensor workspace = at::empty({DeltaWorkspaceFloats(kF, kF)});

  DeltaChunkRows Rows() const {
    return {.q = q.const_data_ptr<float>(),
            .k = k.const_data_ptr<float>(),
            .v = v.const_data_ptr<float>(),
            .row_stride = kF,
            .beta = beta.const_data_ptr<float>(),
            .g = g.const_data_ptr<float>(),
            .gate_stride = 1,
            .num_rows = kC,
            .key_features = kF,
            .value_features = kF,
            .start_KV = start.const_data_ptr<float>()};
  }
};

void Forward(const Chunk& c) {
  Kernels().delta_chunk({.rows = c.Rows(),
                         .out = c.out.mutable_data_ptr<float>(),
                         .out_stride = kF,
                         .u = c.u.mutable_data_ptr<float>(),
                         .u_stride = kF,
                         .stop_KV = c.stop.mutable_data_ptr<float>(),
                         .workspace = c.workspace.mutable_data_ptr<float>()});
}

void Step(const Chunk& c, int64_t t, float* state, float* out) {
  const DeltaChunkRows rows = c.Rows();
  Kernels().delta_step({.q = rows.q + t * kF,
                        .k = rows.k + t * kF,
                        .v = rows.v + t * kF,
                        .beta = rows.beta[t],
                        .decay = std::exp(rows.g[t]),
                        .key_features = kF,
                        .value_features = kF,
                        .state_KV = state,
                        .out = out});
}

// Returns whether a chunk and steps differ by rounding only.
bool StepsAgree(const Chunk& c) {
  Forward(c);
  const at::Tensor state = c.start.clone(), out = at::empty({kC, kF});
  for (int64_t t = 0; t < kC; ++t) {
    Step(c, t, state.mutable_data_ptr<float>(),
         out.mutable_data_ptr<float>() + t * kF);
  }
  return at::allclose(out, c.out, 1e-4, 1e-4) &&
         at::allclose(state, c.stop, 1e-4, 1e-4);
}

void CountFlops(benchmark::State& state, double flops) {
  state.counters["FLOP/s"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

void DeltaChunkForward(benchmark::State& state) {
  const Chunk c;
  if (!StepsAgree(c)) state.SkipWithError("chunk and steps differ");
  for (auto _ : state) {
    Forward(c);
    benchmark::ClobberMemory();
  }
  CountFlops(state, kForwardFlops);
}
BENCHMARK(DeltaChunkForward);

void DeltaChunkGradient(benchmark::State& state) {
  const Chunk c;
  Forward(c);
  const at::Tensor dstart = at::zeros({kF, kF});
  for (auto _ : state) {
    Kernels().delta_chunk_backward(
        {.rows = c.Rows(),
         .u = c.u.const_data_ptr<float>(),
         .u_stride = kF,
         .dout = c.dout.const_data_ptr<float>(),
         .dout_stride = kF,
         .dstop_KV = c.stop.const_data_ptr<float>(),
         .dstart_KV = dstart.mutable_data_ptr<float>(),
         .dq = c.dq.mutable_data_ptr<float>(),
         .dk = c.dk.mutable_data_ptr<float>(),
         .dv = c.dv.mutable_data_ptr<float>(),
         .dbeta = c.dbeta.mutable_data_ptr<float>(),
         .dg = c.dg.mutable_data_ptr<float>(),
         .workspace = c.workspace.mutable_data_ptr<float>()});
    benchmark::ClobberMemory();
  }
  CountFlops(state, kBackwardFlops);
}
BENCHMARK(DeltaChunkGradient);

void DeltaProductAten(benchmark::State& state) {
  const at::Tensor a = at::randn({2 * kC, kF}), b = at::randn({kF, kF});
  at::Tensor out = at::empty({2 * kC, kF});
  at::set_num_threads(1);
  for (auto _ : state) {
    at::mm_out(out, a, b);
    benchmark::ClobberMemory();
  }
  CountFlops(state, 4.0 * kC * kF * kF);
}
BENCHMARK(DeltaProductAten);

// The heads' states are larger than the caches, as they are when other layers'
// weights were read between two steps.
constexpr int64_t kStates = 2048;

void DeltaStepKernel(benchmark::State& state) {
  const Chunk c;
  const at::Tensor states = at::zeros({kStates, kF, kF});
  for (auto _ : state) {
    for (int64_t i = 0; i < kStates; ++i) {
      Step(c, i % kC, states.mutable_data_ptr<float>() + i * kF * kF,
           c.out.mutable_data_ptr<float>());
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kStates * kF * kF * 8);
}
BENCHMARK(DeltaStepKernel);

// Reads and writes the same bytes.
void DeltaStepAten(benchmark::State& state) {
  const at::Tensor states = at::zeros({kStates, kF, kF});
  at::set_num_threads(1);
  for (auto _ : state) {
    states.mul_(0.5);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kStates * kF * kF * 8);
}
BENCHMARK(DeltaStepAten);

}  // namespace
}  // namespace weft::kernels::cpu
