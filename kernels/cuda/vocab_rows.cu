#include "kernels/cuda/device.cuh"
#include "kernels/cuda/vocab_rows.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 512;

// Sums over some of a row's logits against their maximum, in units of the
// softcapped logit c, with d = (c - max) / temperature.
struct RowSums {
  float max;
  float exps;      // Sum of e^d.
  float weighted;  // Sum of d e^d.
};

// The same sums against a maximum that is not lower.
__device__ RowSums MoveTo(float max, RowSums sums, float inverse_temperature) {
  const float shift = (sums.max - max) * inverse_temperature;
  const float factor = expf(shift);
  // Without logits the shift may be as low as -inf, and its factor is 0.
  const float moved =
      factor > 0 ? factor * (sums.weighted + sums.exps * shift) : 0.0F;
  return {max, sums.exps * factor, moved};
}

__device__ float Softcap(float x, float softcap) {
  return softcap > 0 ? softcap * tanhf(x / softcap) : x;
}

__device__ void AddLogit(float c, float inverse_temperature, RowSums* sums) {
  if (c > sums->max) *sums = MoveTo(c, *sums, inverse_temperature);
  const float d = (c - sums->max) * inverse_temperature;
  const float e = expf(d);
  sums->exps += e;
  // A logit of -inf adds 0 * inf = NaN unless it is left out.
  sums->weighted += e > 0 ? d * e : 0.0F;
}

// The sums of the whole row, the same in every thread.
__device__ RowSums SumRow(const VocabRows& rows, const float* x,
                          float inverse_temperature) {
  RowSums sums = {kLowest, 0, 0};
  for (int64_t v = threadIdx.x; v < rows.vocab; v += kThreads) {
    AddLogit(Softcap(x[v], rows.softcap), inverse_temperature, &sums);
  }
  const float max = BlockReduce(sums.max, Max());
  sums = MoveTo(max, sums, inverse_temperature);
  return {max, BlockReduce(sums.exps, Add()),
          BlockReduce(sums.weighted, Add())};
}

__global__ void __launch_bounds__(kThreads) VocabRowsKernel(VocabRows rows) {
  const int64_t row = blockIdx.x;
  float* x = rows.logits_RV + row * rows.vocab;
  const float inverse_temperature = 1 / rows.temperature_R[row];
  const RowSums sums = SumRow(rows, x, inverse_temperature);
  const float log_sum = logf(sums.exps);
  const int64_t end = rows.row_offsets[row + 1];
  for (int64_t e = rows.row_offsets[row] + threadIdx.x; e < end;
       e += kThreads) {
    const float c = Softcap(x[rows.targets_E[e]], rows.softcap);
    rows.logprobs_E[e] = (c - sums.max) * inverse_temperature - log_sum;
  }
  if (rows.entropy_R != nullptr && threadIdx.x == 0) {
    rows.entropy_R[row] = log_sum - sums.weighted / sums.exps;
  }
  if (!rows.softmax_in_place) return;
  // The targets are read before the softmax overwrites them.
  __syncthreads();
  const float inverse_sum = 1 / sums.exps;
  for (int64_t v = threadIdx.x; v < rows.vocab; v += kThreads) {
    const float c = Softcap(x[v], rows.softcap);
    const float tanh = rows.softcap > 0 ? c / rows.softcap : 0.0F;
    x[v] = expf((c - sums.max) * inverse_temperature) * inverse_sum *
           (1 - tanh * tanh);
  }
}

}  // namespace

cudaError_t ScoreVocabRows(const VocabRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return Launch(VocabRowsKernel, rows.num_rows, 1, kThreads, stream, rows);
}

}  // namespace weft::kernels::cuda
