#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMixWarps = kThreads / kWarp;
// A warp computes a head of q or k, or this many features of v, of one row.
constexpr int64_t kGroupFeatures = 128;

__device__ float Sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

__device__ int64_t NormedFeatures(const DeltaMixRows& rows) {
  return 2 * rows.num_key_heads * rows.key_features;
}

// The features [begin, end) of a warp. `scale` multiplies the norm of a head.
struct Group {
  int64_t begin;
  int64_t end;
  bool is_normed;
  float scale;
};

__device__ Group GroupOf(const DeltaMixRows& rows, int64_t index) {
  const int64_t heads = 2 * rows.num_key_heads;
  if (index < heads) {
    return {index * rows.key_features, (index + 1) * rows.key_features, true,
            index < rows.num_key_heads ? rows.query_scale : 1.0F};
  }
  const int64_t begin = NormedFeatures(rows) + (index - heads) * kGroupFeatures;
  const int64_t end = begin + kGroupFeatures;
  return {begin, end < rows.num_features ? end : rows.num_features, false, 1};
}

int64_t NumGroups(const DeltaMixRows& rows) {
  const int64_t values =
      rows.num_features - 2 * rows.num_key_heads * rows.key_features;
  return 2 * rows.num_key_heads + CeilDiv(values, kGroupFeatures);
}

// Returns the row that tap r of row t reads, or null for zeros.
template <typename T>
__device__ const T* TapOf(const DeltaMixRows& rows, int64_t t, int64_t r) {
  const int64_t num_earlier = rows.num_taps - 1;
  const T* x = static_cast<const T*>(rows.x_TW);
  if (r == num_earlier) return x + t * rows.x_stride;
  const int64_t row = rows.earlier_TR ? rows.earlier_TR[t * num_earlier + r]
                                      : rows.num_rows + t * num_earlier + r;
  if (row < 0) return nullptr;
  if (row < rows.num_rows) return x + row * rows.x_stride;
  return static_cast<const T*>(rows.history_W) +
         (row - rows.num_rows) * rows.num_features;
}

template <typename T, typename W>
__device__ float Convolve(const DeltaMixRows& rows, int64_t t, int64_t i) {
  float sum = rows.bias_W ? ToFloat(static_cast<const W*>(rows.bias_W)[i]) : 0;
  for (int64_t r = 0; r < rows.num_taps; ++r) {
    const T* tap = TapOf<T>(rows, t, r);
    if (tap == nullptr) continue;
    const W* weight =
        static_cast<const W*>(rows.weight_RW) + r * rows.num_features;
    sum += ToFloat(weight[i]) * ToFloat(tap[i]);
  }
  return sum;
}

// Computes the gates of a row.
template <typename T>
__device__ void MixGates(const DeltaMixRows& rows, int64_t t, float* beta_TH,
                         float* g_TH) {
  const T* beta = static_cast<const T*>(rows.beta_TH) + t * rows.beta_stride;
  const T* alpha = static_cast<const T*>(rows.alpha_TH) + t * rows.alpha_stride;
  for (int64_t h = threadIdx.x; h < rows.num_value_heads; h += kThreads) {
    const float x = ToFloat(alpha[h]) + rows.dt_bias_H[h];
    // log(1 + e^x) without overflow.
    const float softplus = fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
    beta_TH[t * rows.num_value_heads + h] = Sigmoid(ToFloat(beta[h]));
    g_TH[t * rows.num_value_heads + h] = -expf(rows.a_log_H[h]) * softplus;
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, 4)
    DeltaMixKernel(DeltaMixRows rows, int64_t num_groups, float* mixed_TW,
                   float* beta_TH, float* g_TH) {
  const int64_t t = blockIdx.x;
  if (blockIdx.y == 0) MixGates<T>(rows, t, beta_TH, g_TH);
  const int64_t index = int64_t{blockIdx.y} * kMixWarps + WarpIndex();
  if (index >= num_groups) return;
  const Group group = GroupOf(rows, index);
  float* mixed = mixed_TW + t * rows.num_features;
  float squares = 0;
  for (int64_t i = group.begin + Lane(); i < group.end; i += kWarp) {
    const float conv = Convolve<T, W>(rows, t, i);
    const float y = conv * Sigmoid(conv);
    squares += y * y;
    mixed[i] = y;
  }
  if (!group.is_normed) return;
  const float factor =
      group.scale * rsqrtf(WarpReduce(squares, Add()) + rows.l2_eps);
  for (int64_t i = group.begin + Lane(); i < group.end; i += kWarp) {
    mixed[i] *= factor;
  }
}

// With y = silu(conv) and a head's length 1 / inverse: dy = inverse (d - y
// inverse^2 (d . y)).
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, 4)
    DeltaMixBackwardKernel(DeltaMixRows rows, int64_t num_groups, float* d_TW) {
  const int64_t t = blockIdx.x;
  const int64_t index = int64_t{blockIdx.y} * kMixWarps + WarpIndex();
  if (index >= num_groups) return;
  const Group group = GroupOf(rows, index);
  float* d = d_TW + t * rows.num_features;
  float squares = 0, dot = 0;
  if (group.is_normed) {
    for (int64_t i = group.begin + Lane(); i < group.end; i += kWarp) {
      const float conv = Convolve<T, W>(rows, t, i);
      const float y = conv * Sigmoid(conv);
      squares += y * y;
      dot += y * d[i];
    }
    squares = 1.0F / (WarpReduce(squares, Add()) + rows.l2_eps);
    dot = WarpReduce(dot, Add());
  }
  const float inverse = group.is_normed ? group.scale * sqrtf(squares) : 1.0F;
  for (int64_t i = group.begin + Lane(); i < group.end; i += kWarp) {
    const float conv = Convolve<T, W>(rows, t, i);
    const float sigmoid = Sigmoid(conv);
    const float dy = inverse * (d[i] - conv * sigmoid * squares * dot);
    d[i] = dy * sigmoid * (1.0F + conv * (1.0F - sigmoid));
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads)
    DeltaConvBackwardKernel(DeltaMixRows rows, DeltaLaterRows later,
                            const float* d_TW, T* dx_TW, int64_t dx_stride) {
  const int64_t t = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i >= rows.num_features) return;
  const W* weight = static_cast<const W*>(rows.weight_RW) + i;
  const auto term = [&](int64_t row, int64_t tap) {
    return ToFloat(weight[tap * rows.num_features]) *
           d_TW[row * rows.num_features + i];
  };
  float sum = term(t, rows.num_taps - 1);
  for (int64_t n = later.offsets[t]; n < later.offsets[t + 1]; ++n) {
    sum += term(later.later[n] / rows.num_taps, later.later[n] % rows.num_taps);
  }
  Store(sum, dx_TW + t * dx_stride + i);
}

}  // namespace

cudaError_t MixDeltaRows(const DeltaMixRows& rows, float* mixed_TW,
                         float* beta_TH, float* g_TH, cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithTypes(rows.dtype, rows.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return Launch(DeltaMixKernel<T, W>, rows.num_rows,
                                   CeilDiv(NumGroups(rows), kMixWarps),
                                   kThreads, stream, rows, NumGroups(rows),
                                   mixed_TW, beta_TH, g_TH);
                   });
}

cudaError_t MixDeltaRowsBackward(const DeltaMixRows& rows, float* d_TW,
                                 cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithTypes(rows.dtype, rows.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return Launch(DeltaMixBackwardKernel<T, W>, rows.num_rows,
                                   CeilDiv(NumGroups(rows), kMixWarps),
                                   kThreads, stream, rows, NumGroups(rows),
                                   d_TW);
                   });
}

cudaError_t DeltaConvBackward(const DeltaMixRows& rows,
                              const DeltaLaterRows& later, const float* d_TW,
                              void* dx_TW, int64_t dx_stride,
                              cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithTypes(rows.dtype, rows.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return Launch(DeltaConvBackwardKernel<T, W>, rows.num_rows,
                                   CeilDiv(rows.num_features, kThreads),
                                   kThreads, stream, rows, later, d_TW,
                                   static_cast<T*>(dx_TW), dx_stride);
                   });
}

}  // namespace weft::kernels::cuda
