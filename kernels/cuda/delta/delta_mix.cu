#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// The taps of all known models. Their number is known when the kernel is
// compiled.
constexpr int kUsualTaps = 4;
constexpr int kMostTaps = kMaxDeltaMixTaps;

__device__ float Sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

// Teams of lanes divide the features of a row. A team computes a head of q or
// k, or some features of v.
struct Teams {
  int lanes = 1;  // A power of two, at most kWarp.
  int64_t num_heads = 0;
  int64_t head_features = 0;
  int64_t value_features = 0;  // Of v, of a team.
  int64_t num_teams = 0;

  Teams(const DeltaMixRows& rows, int width)
      : lanes(LanesOf(CeilDiv(rows.key_features, width))),
        num_heads(2 * rows.num_key_heads),
        head_features(rows.key_features),
        value_features(int64_t{lanes} * width) {
    const int64_t values = rows.num_features - num_heads * head_features;
    num_teams = num_heads + CeilDiv(values, value_features);
  }
  int64_t GridY() const { return CeilDiv(num_teams * lanes, kThreads); }

  // The index of the thread's team, which may be num_teams or more.
  __device__ int64_t Index() const {
    return (int64_t{blockIdx.y} * kThreads + threadIdx.x) / lanes;
  }
  __device__ int LaneOfTeam() const {
    return static_cast<int>(threadIdx.x) % lanes;
  }
  // All lanes of a warp call it.
  __device__ float Sum(float x) const {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, offset);
    }
    return x;
  }
};

// The features of a team. `scale` multiplies the norm of a head.
struct Group {
  int64_t begin = 0;
  int64_t end = 0;
  bool is_normed = false;
  float scale = 1;

  __device__ Group(const DeltaMixRows& rows, const Teams& teams) {
    const int64_t index = teams.Index();
    if (index >= teams.num_teams) return;
    is_normed = index < teams.num_heads;
    if (is_normed) {
      begin = index * teams.head_features;
      end = begin + teams.head_features;
      if (2 * index < teams.num_heads) scale = rows.query_scale;
    } else {
      begin = teams.num_heads * teams.head_features +
              (index - teams.num_heads) * teams.value_features;
      end = begin + teams.value_features;
      if (end > rows.num_features) end = rows.num_features;
    }
  }
};

// The rows that the convolution of row t reads. kTaps: kUsualTaps, or the most.
template <typename T, typename W, int kN, int kTaps>
struct Convolution {
  const T* taps[kTaps];  // Null: zeros.
  const W* weight_RW;
  const W* bias_W;
  int64_t num_features;
  int num_taps;

  __device__ Convolution(const DeltaMixRows& rows, int64_t t)
      : weight_RW(static_cast<const W*>(rows.weight_RW)),
        bias_W(static_cast<const W*>(rows.bias_W)),
        num_features(rows.num_features),
        num_taps(static_cast<int>(rows.num_taps)) {
    const auto* x = static_cast<const T*>(rows.x_TW);
    const int num_earlier = num_taps - 1;
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      taps[r] = nullptr;
      if (r >= num_earlier) {
        if (r == num_earlier) taps[r] = x + t * rows.x_stride;
        continue;
      }
      const int64_t row = rows.earlier_TR ? rows.earlier_TR[t * num_earlier + r]
                                          : rows.num_rows + t * num_earlier + r;
      if (row >= rows.num_rows) {
        taps[r] = static_cast<const T*>(rows.history_W) +
                  (row - rows.num_rows) * num_features;
      } else if (row >= 0) {
        taps[r] = x + row * rows.x_stride;
      }
    }
  }

  // Computes the features [i, i + kN).
  __device__ Pack<float, kN> At(int64_t i) const {
    Pack<float, kN> sums = {};
    if (bias_W) {
      const auto bias = LoadPack<kN>(bias_W + i);
#pragma unroll
      for (int e = 0; e < kN; ++e) sums.elements[e] = bias[e];
    }
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      if (taps[r] == nullptr) continue;
      const auto x = LoadPack<kN>(taps[r] + i);
      const auto weight = LoadPack<kN>(weight_RW + r * num_features + i);
#pragma unroll
      for (int e = 0; e < kN; ++e) sums.elements[e] += weight[e] * x[e];
    }
    return sums;
  }
};

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

template <typename T, typename W, int kN, int kTaps>
__global__ void __launch_bounds__(kThreads, 4)
    DeltaMixKernel(DeltaMixRows rows, Teams teams, T* mixed_TW, float* beta_TH,
                   float* g_TH) {
  const int64_t t = blockIdx.x;
  if (blockIdx.y == 0) MixGates<T>(rows, t, beta_TH, g_TH);
  const Group group(rows, teams);
  const Convolution<T, W, kN, kTaps> convolution(rows, t);
  const int64_t first = group.begin + teams.LaneOfTeam() * kN;
  const int64_t step = teams.value_features;
  Pack<float, kN> y = {};
  const auto compute = [&](int64_t i) {
    y = convolution.At(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) y.elements[e] *= Sigmoid(y[e]);
  };
  float squares = 0;
#pragma unroll 1
  for (int64_t i = first; i < group.end; i += step) {
    compute(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) squares += y[e] * y[e];
  }
  squares = teams.Sum(squares);
  const float factor =
      group.is_normed ? group.scale * rsqrtf(squares + rows.l2_eps) : 1.0F;
#pragma unroll 1
  for (int64_t i = first; i < group.end; i += step) {
    // A lane with one pack still has it.
    if (group.end - group.begin > step) compute(i);
    Pack<T, kN> pack;
#pragma unroll
    for (int e = 0; e < kN; ++e) pack.Set(e, factor * y[e]);
    StorePack(pack, mixed_TW + t * rows.num_features + i);
  }
}

// With y = silu(conv) and a head's length 1 / inverse: dy = inverse (d - y
// inverse^2 (d . y)).
template <typename T, typename W, int kN, int kTaps>
__global__ void __launch_bounds__(kThreads, 3)
    DeltaMixBackwardKernel(DeltaMixRows rows, Teams teams, float* d_TW) {
  const int64_t t = blockIdx.x;
  const Group group(rows, teams);
  const Convolution<T, W, kN, kTaps> convolution(rows, t);
  const int64_t first = group.begin + teams.LaneOfTeam() * kN;
  const int64_t step = teams.value_features;
  float* d = d_TW + t * rows.num_features;
  Pack<float, kN> conv = {}, own = {};
  const auto load = [&](int64_t i) {
    conv = convolution.At(i);
    own = LoadPack<kN>(d + i);
  };
  float squares = 0, dot = 0;
#pragma unroll 1
  for (int64_t i = first; i < group.end; i += step) {
    load(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const float y = conv[e] * Sigmoid(conv[e]);
      squares += y * y;
      dot += y * own[e];
    }
  }
  squares = 1.0F / (teams.Sum(squares) + rows.l2_eps);
  dot = teams.Sum(dot);
  if (!group.is_normed) dot = 0;
  const float inverse = group.is_normed ? group.scale * sqrtf(squares) : 1.0F;
#pragma unroll 1
  for (int64_t i = first; i < group.end; i += step) {
    if (group.end - group.begin > step) load(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const float sigmoid = Sigmoid(conv[e]);
      const float dy = inverse * (own[e] - conv[e] * sigmoid * squares * dot);
      own.elements[e] = dy * sigmoid * (1.0F + conv[e] * (1.0F - sigmoid));
    }
    StorePack(own, d + i);
  }
}

template <typename T, typename W, int kN>
__global__ void __launch_bounds__(kThreads)
    DeltaConvBackwardKernel(DeltaMixRows rows, DeltaLaterRows later,
                            const float* d_TW, T* dx_TW, int64_t dx_stride) {
  const int64_t t = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kN;
  if (i >= rows.num_features) return;
  const W* weight_RW = static_cast<const W*>(rows.weight_RW) + i;
  Pack<float, kN> sums = {};
  const auto add = [&](int64_t row, int64_t tap) {
    const auto weight = LoadPack<kN>(weight_RW + tap * rows.num_features);
    const auto d = LoadPack<kN>(d_TW + row * rows.num_features + i);
#pragma unroll
    for (int e = 0; e < kN; ++e) sums.elements[e] += weight[e] * d[e];
  };
  add(t, rows.num_taps - 1);
  for (int64_t n = later.offsets[t]; n < later.offsets[t + 1]; ++n) {
    const DeltaLaterRow entry = later.later[n];
    add(entry.row, entry.tap);
  }
  Pack<T, kN> pack;
#pragma unroll
  for (int e = 0; e < kN; ++e) pack.Set(e, sums[e]);
  StorePack(pack, dx_TW + t * dx_stride + i);
}

// Returns whether all rows and heads, also those of `out`, consist of whole
// packs, which begin at multiples of 16 bytes.
template <typename T, typename W>
bool AreWide(const DeltaMixRows& rows, const void* out) {
  constexpr int kN = kWidth<T>;
  return rows.num_features % kN == 0 && rows.key_features % kN == 0 &&
         IsWide<T>(rows.x_TW, rows.x_stride) && IsWide<T>(rows.history_W, 0) &&
         IsWide<W>(rows.weight_RW, 0) && IsWide<W>(rows.bias_W, 0) &&
         IsWide<float>(out, 0);
}

// Calls run(t, w, width, taps) with null pointers of the rows' and the weight's
// types, the elements of a pack and the number of taps.
template <typename Run>
cudaError_t WithKind(const DeltaMixRows& rows, const void* out, Run run) {
  return WithTypes(
      rows.dtype, rows.weight_dtype,
      [&]<typename T, typename W>(const T* t, const W* w) {
        using Narrow = std::integral_constant<int, 1>;
        if (rows.num_taps > kMostTaps) return cudaErrorInvalidValue;
        return AreWide<T, W>(rows, out) && rows.num_taps == kUsualTaps
                   ? run(t, w, std::integral_constant<int, kWidth<T>>(),
                         std::integral_constant<int, kUsualTaps>())
                   : run(t, w, Narrow(),
                         std::integral_constant<int, kMostTaps>());
      });
}

}  // namespace

cudaError_t MixDeltaRows(const DeltaMixRows& rows, void* mixed_TW,
                         float* beta_TH, float* g_TH, cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithKind(
      rows, mixed_TW,
      [&]<typename T, typename W>(const T*, const W*, auto width, auto taps) {
        const Teams teams(rows, width);
        return Launch(DeltaMixKernel<T, W, width(), taps()>, rows.num_rows,
                      teams.GridY(), kThreads, stream, rows, teams,
                      static_cast<T*>(mixed_TW), beta_TH, g_TH);
      });
}

cudaError_t MixDeltaRowsBackward(const DeltaMixRows& rows, float* d_TW,
                                 cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithKind(
      rows, d_TW,
      [&]<typename T, typename W>(const T*, const W*, auto width, auto taps) {
        const Teams teams(rows, width);
        return Launch(DeltaMixBackwardKernel<T, W, width(), taps()>,
                      rows.num_rows, teams.GridY(), kThreads, stream, rows,
                      teams, d_TW);
      });
}

cudaError_t DeltaConvBackward(const DeltaMixRows& rows,
                              const DeltaLaterRows& later, const float* d_TW,
                              void* dx_TW, int64_t dx_stride,
                              cudaStream_t stream) {
  if (rows.num_rows == 0) return cudaSuccess;
  return WithTypes(
      rows.dtype, rows.weight_dtype,
      [&]<typename T, typename W>(const T*, const W*) {
        const bool is_wide =
            AreWide<T, W>(rows, d_TW) && IsWide<T>(dx_TW, dx_stride);
        return WithWidth<T>(is_wide, [&](auto width) {
          return Launch(DeltaConvBackwardKernel<T, W, width()>, rows.num_rows,
                        CeilDiv(rows.num_features, kThreads * width()),
                        kThreads, stream, rows, later, d_TW,
                        static_cast<T*>(dx_TW), dx_stride);
        });
      });
}

}  // namespace weft::kernels::cuda
