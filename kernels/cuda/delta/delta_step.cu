#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStepWarps = kThreads / kWarp;
// Each warp keeps this many rows of the state's columns in registers.
constexpr int kStepRows = kMaxDeltaStepKeys / kStepWarps;

// Returns the sum of the warps' values for the thread's lane, in their order.
__device__ float SumOverWarps(float value, float (*partial)[kWarp]) {
  partial[WarpIndex()][Lane()] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kStepWarps; ++warp) sum += partial[warp][Lane()];
  return sum;
}

// A block computes 32 value features of one head of one sequence. A lane has
// one of them.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    DeltaStepKernel(DeltaRuleRows rows, const int64_t* slots_T,
                    int64_t padding_slot, float* state_NHKV, T* out_THV) {
  __shared__ float partial[2][kStepWarps][kWarp];
  const int64_t keys = rows.key_features, values = rows.value_features;
  const int64_t heads = rows.num_value_heads;
  const int64_t t = blockIdx.x / heads, h = blockIdx.x % heads;
  const int64_t v = int64_t{blockIdx.y} * kWarp + Lane();
  const bool is_there = v < values;
  T* const result = out_THV + (t * heads + h) * values + v;
  if (slots_T[t] == padding_slot) {
    if (WarpIndex() == 0 && is_there) Store(0, result);
    return;
  }
  const int64_t all_keys = rows.num_key_heads * keys;
  const T* row = static_cast<const T*>(rows.mixed_TW) +
                 t * (2 * all_keys + heads * values);
  const T* q = row + h / (heads / rows.num_key_heads) * keys;
  const T* k = q + all_keys;
  const float decay = expf(rows.g_TH[t * heads + h]);
  float* state = state_NHKV + (slots_T[t] * heads + h) * keys * values + v;
  float s[kStepRows];
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kStepRows; ++j) {
    const int i = j * kStepWarps + WarpIndex();
    s[j] = is_there && i < keys ? state[i * values] : 0;
  }
#pragma unroll
  for (int j = 0; j < kStepRows; ++j) {
    const int i = j * kStepWarps + WarpIndex();
    s[j] *= decay;
    if (i < keys) sum += ToFloat(k[i]) * s[j];
  }
  sum = SumOverWarps(sum, partial[0]);
  const float value =
      is_there ? ToFloat(row[2 * all_keys + h * values + v]) : 0;
  const float u = rows.beta_TH[t * heads + h] * (value - sum);
  float out = 0;
#pragma unroll
  for (int j = 0; j < kStepRows; ++j) {
    const int i = j * kStepWarps + WarpIndex();
    if (i >= keys) continue;
    s[j] += ToFloat(k[i]) * u;
    out += ToFloat(q[i]) * s[j];
    if (is_there) state[i * values] = s[j];
  }
  out = SumOverWarps(out, partial[1]);
  if (WarpIndex() == 0 && is_there) Store(out, result);
}

}  // namespace

cudaError_t DeltaStep(const DeltaRuleRows& rows, int64_t num_rows,
                      const int64_t* slots_T, int64_t padding_slot,
                      float* state_NHKV, DType dtype, void* out,
                      cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  if (rows.key_features > kMaxDeltaStepKeys) return cudaErrorInvalidValue;
  return WithType(dtype, [&]<typename T>(const T*) {
    return Launch(DeltaStepKernel<T>, num_rows * rows.num_value_heads,
                  CeilDiv(rows.value_features, kWarp), kThreads, stream, rows,
                  slots_T, padding_slot, state_NHKV, static_cast<T*>(out));
  });
}

}  // namespace weft::kernels::cuda
