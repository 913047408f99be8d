// Times each kernel of lora_decode.h, and the separate launches that the kernel
// replaces. Replays graphs of layers whose matrices exceed the cache.
#include <cstdint>
#include <vector>

#include "kernels/cuda/bench/bench.h"
#include "kernels/cuda/bench/lora_join.h"

namespace weft::kernels::cuda::bench {
namespace {

const std::vector<Join>& Joins() {
  static const std::vector<Join> joins = {
      {"qkv", JoinKind::kHeads, 4096, {4096, 1024, 1024}, 0, 0},
      {"o to gate_up", JoinKind::kResidual, 4096, {4096}, 4096, 2},
      {"gate_up to down", JoinKind::kGate, 4096, {14336, 14336}, 14336, 1},
      {"down to qkv", JoinKind::kResidual, 14336, {4096}, 4096, 3}};
  return joins;
}

constexpr Batch kBatches[] = {{1, 1},   {8, 1},   {8, 8},   {64, 1},
                              {64, 64}, {256, 1}, {256, 64}};

void BenchJoin(const Device& device, const Join& join, const Batch& batch,
               int64_t rank) {
  const JoinProblem problem(join, batch, rank);
  problem.CheckResults();
  const double separate = ReplaySeconds(
      problem.num_layers(), [&](int64_t layer, cudaStream_t stream) {
        problem.RunSeparate(layer, stream);
      });
  const double joined = ReplaySeconds(problem.num_layers(),
                                      [&](int64_t layer, cudaStream_t stream) {
                                        problem.RunJoined(layer, stream);
                                      });
  Line("lora_decode")
      .Add("launch", join.name)
      .Add("rows", batch.rows)
      .Add("adapters", batch.adapters)
      .Add("rank", rank)
      .AddTime("separate", separate)
      .AddTime("joined", joined)
      .AddTime("copy", problem.NumBytes() / device.copy_rate())
      .Print();
}

}  // namespace

void BenchLoraDecode(const Device& device) {
  for (const int64_t rank : {8, 32, 128}) {
    for (const Join& join : Joins()) {
      for (const Batch& batch : kBatches) {
        BenchJoin(device, join, batch, rank);
      }
    }
  }
}

}  // namespace weft::kernels::cuda::bench
