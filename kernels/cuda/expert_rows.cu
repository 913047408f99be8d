#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/expert_rows.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

// A block sorts the rows of one expert. Every block reads all of experts_TK, so
// that no block waits for another. For the rows of a decode step these reads
// come from the cache.
__global__ void __launch_bounds__(kThreads)
    SortByExpertKernel(ExpertSort sort) {
  const int64_t expert = blockIdx.x;
  int64_t lower = 0, own = 0;
  for (int64_t i = threadIdx.x; i < sort.num_rows; i += kThreads) {
    lower += sort.experts_TK[i] < expert ? 1 : 0;
    own += sort.experts_TK[i] == expert ? 1 : 0;
  }
  int64_t row = BlockReduce(lower, Add());
  own = BlockReduce(own, Add());
  if (threadIdx.x == 0) sort.ends_E[expert] = static_cast<int32_t>(row + own);
  if (own == 0) return;
  for (int64_t first = 0; first < sort.num_rows; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const bool is_own = i < sort.num_rows && sort.experts_TK[i] == expert;
    uint64_t total = 0;
    const int64_t at =
        row + static_cast<int64_t>(BlockScan(is_own ? 1 : 0, &total));
    row += static_cast<int64_t>(total);
    if (!is_own) continue;
    sort.tokens_N[at] = i / sort.per_token;
    sort.pairs_N[at] = i;
    sort.places_TK[i] = at;
  }
}

// A block adds up some features of one token, and a thread those of a pack.
template <typename T, int kN>
__global__ void __launch_bounds__(kThreads)
    SumExpertRowsKernel(ExpertSums sums) {
  const int64_t token = blockIdx.x;
  const int64_t first = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kN;
  if (first >= sums.features) return;
  const int64_t* places = sums.places_TK + token * sums.per_token;
  const T* rows = static_cast<const T*>(sums.rows_NH) + first;
  float sum[kN] = {};
#pragma unroll 4
  for (int64_t k = 0; k < sums.per_token; ++k) {
    const auto row = LoadPack<kN>(rows + places[k] * sums.features);
#pragma unroll
    for (int i = 0; i < kN; ++i) sum[i] += row[i];
  }
  Pack<T, kN> result;
#pragma unroll
  for (int i = 0; i < kN; ++i) result.Set(i, sum[i]);
  StorePack(result,
            static_cast<T*>(sums.sums_TH) + token * sums.features + first);
}

__global__ void __launch_bounds__(kThreads)
    KeepExpertsKernel(ExpertColumns experts) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= experts.num_tokens * experts.per_token) return;
  const int64_t slot = experts.slots_T[i / experts.per_token];
  if (slot < 0) return;
  experts.experts_SW[slot * experts.width + experts.column +
                     i % experts.per_token] =
      static_cast<int16_t>(experts.experts_TK[i]);
}

}  // namespace

cudaError_t SortByExpert(const ExpertSort& sort, cudaStream_t stream) {
  if (sort.num_experts == 0) return cudaSuccess;
  return Launch(SortByExpertKernel, sort.num_experts, 1, kThreads, stream,
                sort);
}

cudaError_t SumExpertRows(const ExpertSums& sums, cudaStream_t stream) {
  if (sums.num_tokens == 0 || sums.features == 0) return cudaSuccess;
  return WithType(sums.dtype, [&]<typename T>(const T*) {
    const bool is_wide = IsWide<T>(sums.rows_NH, sums.features) &&
                         IsWide<T>(sums.sums_TH, sums.features);
    return WithWidth<T>(is_wide, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const int64_t packs = CeilDiv(sums.features, kN);
      const unsigned threads = PackThreads(packs, /*kept=*/1, kThreads);
      return Launch(SumExpertRowsKernel<T, kN>, sums.num_tokens,
                    CeilDiv(packs, threads), threads, stream, sums);
    });
  });
}

cudaError_t KeepExperts(const ExpertColumns& experts, cudaStream_t stream) {
  const int64_t num_blocks =
      CeilDiv(experts.num_tokens * experts.per_token, kThreads);
  if (num_blocks == 0) return cudaSuccess;
  return Launch(KeepExpertsKernel, num_blocks, 1, kThreads, stream, experts);
}

}  // namespace weft::kernels::cuda
