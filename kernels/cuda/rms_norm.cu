#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/rms_norm.h"

namespace weft::kernels::cuda {
namespace {

// The number of packs of a row that each thread keeps in registers. A block of
// kMaxThreads threads keeps whole rows of up to 8192 bf16 features.
constexpr int kKept = 2;
constexpr int kMaxThreads = 512;

// The rows of one tensor. `data` is null if the kernel does not use the tensor.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  __device__ T* Of(int64_t row) const { return data + row * stride; }
};

// One block normalizes one row. If kAdd, adds the row of x to the row of sum
// and normalizes the row of sum. Otherwise normalizes the row of x.
template <typename T, typename W, int kN, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads)
    RmsNormKernel(Rows<const T> x_TD, Rows<T> sum_TD, Rows<T> y_TD,
                  const W* weight_D, int features, float eps) {
  struct Part {
    Pack<T, kN> row;
    Pack<T, kN> added;  // Used only with kAdd.
  };
  const T* x = x_TD.Of(blockIdx.x);
  T* sum = sum_TD.Of(blockIdx.x);
  T* y = y_TD.Of(blockIdx.x);
  const int packs = features / kN;
  ThreadRow<Part, kKept> row;
  float squares = 0;
  WaitForEarlierLaunches();
  row.Read(
      packs,
      [&](int i) {
        Part part;
        if constexpr (kAdd) {
          part.added = LoadPack<kN>(x + i * kN);
          part.row = LoadPack<kN>(sum + i * kN);
        } else {
          part.row = LoadPack<kN>(x + i * kN);
        }
        return part;
      },
      [&](int i, Part& part) {
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          if constexpr (kAdd) part.row.Set(k, part.row[k] + part.added[k]);
          squares += part.row[k] * part.row[k];
        }
        if constexpr (kAdd) StorePack(part.row, sum + i * kN);
      });
  squares = BlockReduce(squares, Add());
  const float inverse = rsqrtf(squares / static_cast<float>(features) + eps);
  row.Finish(
      packs,
      [&](int i) {
        return Part{.row = LoadPack<kN>((kAdd ? sum : x) + i * kN)};
      },
      [&](int i, Part part) {
        const auto weight = LoadPack<kN>(weight_D + i * kN);
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          part.row.Set(k, part.row[k] * inverse * weight[k]);
        }
        StorePack(part.row, y + i * kN);
      });
}

struct Sums {
  float squares;
  float dot;
};

// Returns the sums over the block. A kernel calls it only once, because no
// barrier protects `partial` from a second call.
__device__ Sums SumOverBlock(Sums sums) {
  __shared__ Sums partial[kMaxWarps];
  sums = {WarpReduce(sums.squares, Add()), WarpReduce(sums.dot, Add())};
  if (Lane() == 0) partial[WarpIndex()] = sums;
  __syncthreads();
  sums = partial[0];
  for (int warp = 1; warp < NumWarps(); ++warp) {
    sums.squares += partial[warp].squares;
    sums.dot += partial[warp].dot;
  }
  return sums;
}

// With inverse = 1 / rms(x), d = dy * weight and n = x * inverse, computes dx
// += (d - n mean(d n)) * inverse. One block computes one row.
template <typename T, typename W, int kN>
__global__ void __launch_bounds__(kMaxThreads)
    RmsNormBackwardKernel(Rows<const T> dy_TD, Rows<const T> x_TD,
                          Rows<T> dx_TD, const W* weight_D, int features,
                          float eps) {
  struct Part {
    Pack<T, kN> dy;
    Pack<T, kN> x;
    Pack<T, kN> dx;
    // Includes the weight, so that Finish loads nothing for a kept part.
    Pack<W, kN> weight;
  };
  const T* dy = dy_TD.Of(blockIdx.x);
  const T* x = x_TD.Of(blockIdx.x);
  T* dx = dx_TD.Of(blockIdx.x);
  const int packs = features / kN;
  const auto load = [&](int i) {
    return Part{.dy = LoadPack<kN>(dy + i * kN),
                .x = LoadPack<kN>(x + i * kN),
                .dx = LoadPack<kN>(dx + i * kN),
                .weight = LoadPack<kN>(weight_D + i * kN)};
  };
  ThreadRow<Part, kKept> row;
  Sums sums = {0, 0};
  row.Read(packs, load, [&](int /*i*/, Part& part) {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      sums.squares += part.x[k] * part.x[k];
      sums.dot += part.dy[k] * part.weight[k] * part.x[k];
    }
  });
  sums = SumOverBlock(sums);
  const auto count = static_cast<float>(features);
  const float inverse = rsqrtf(sums.squares / count + eps);
  const float mean = sums.dot * inverse / count;
  row.Finish(packs, load, [&](int i, Part part) {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      const float d = part.dy[k] * part.weight[k];
      const float n = part.x[k] * inverse;
      part.dx.Set(k, part.dx[k] + (d - n * mean) * inverse);
    }
    StorePack(part.dx, dx + i * kN);
  });
}

// Returns whether x and the weight can be read in packs of kWidth<T>.
template <typename T>
bool TakesPacks(const RmsNormRows& rows) {
  return IsWide<T>(rows.x_TD, rows.x_stride) &&
         IsWide<T>(rows.weight_D, rows.features);
}

template <typename T, typename W, bool kAdd>
cudaError_t LaunchForward(const RmsNormRows& rows, Rows<T> sum_TD, Rows<T> y_TD,
                          cudaStream_t stream) {
  const bool is_wide = TakesPacks<T>(rows) &&
                       IsWide<T>(y_TD.data, y_TD.stride) &&
                       IsWide<T>(sum_TD.data, sum_TD.stride);
  return WithWidth<T>(is_wide, [&](auto width) {
    constexpr int kN = decltype(width)::value;
    return LaunchEarly(
        RmsNormKernel<T, W, kN, kAdd>, rows.num_rows, 1,
        PackThreads(rows.features / kN, kKept, kMaxThreads), stream,
        Rows<const T>{static_cast<const T*>(rows.x_TD), rows.x_stride}, sum_TD,
        y_TD, static_cast<const W*>(rows.weight_D), rows.features, rows.eps);
  });
}

}  // namespace

cudaError_t RmsNorm(const RmsNormRows& rows, void* y_TD, int64_t y_stride,
                    cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.features == 0) return cudaSuccess;
  return WithTypes(rows.dtype, rows.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return LaunchForward<T, W, false>(
                         rows, {nullptr, 0}, {static_cast<T*>(y_TD), y_stride},
                         stream);
                   });
}

cudaError_t AddRmsNorm(const RmsNormRows& rows, void* sum_TD,
                       int64_t sum_stride, void* y_TD, int64_t y_stride,
                       cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.features == 0) return cudaSuccess;
  return WithTypes(rows.dtype, rows.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return LaunchForward<T, W, true>(
                         rows, {static_cast<T*>(sum_TD), sum_stride},
                         {static_cast<T*>(y_TD), y_stride}, stream);
                   });
}

cudaError_t RmsNormBackward(const RmsNormRows& rows, const void* dy_TD,
                            int64_t dy_stride, void* dx_TD, int64_t dx_stride,
                            cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.features == 0) return cudaSuccess;
  const auto run = [&]<typename T, typename W>(const T*, const W*) {
    const bool is_wide = TakesPacks<T>(rows) && IsWide<T>(dy_TD, dy_stride) &&
                         IsWide<T>(dx_TD, dx_stride);
    return WithWidth<T>(is_wide, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      return Launch(
          RmsNormBackwardKernel<T, W, kN>, rows.num_rows, 1,
          PackThreads(rows.features / kN, kKept, kMaxThreads), stream,
          Rows<const T>{static_cast<const T*>(dy_TD), dy_stride},
          Rows<const T>{static_cast<const T*>(rows.x_TD), rows.x_stride},
          Rows<T>{static_cast<T*>(dx_TD), dx_stride},
          static_cast<const W*>(rows.weight_D), rows.features, rows.eps);
    });
  };
  return WithTypes(rows.dtype, rows.weight_dtype, run);
}

}  // namespace weft::kernels::cuda
