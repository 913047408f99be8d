#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rotary.cuh"

namespace weft::kernels::cuda {
namespace {

// With 384 threads, a block computes 48 heads (32 of q, 8 of k, 8 of v) of 128
// bf16 features at once.
constexpr int kMaxThreads = 384;
// Blocks per multiprocessor. With more blocks, a thread would have too few
// registers and would spill.
template <bool kNorm>
constexpr int kMinBlocks = kNorm ? 2 : 3;
constexpr int64_t kMaxPairs = int64_t{1} << 30;

// A block computes one token: it prepares the heads of q and k, and writes k
// and v to the pages if the token has a slot.
template <typename T, typename W, int kN, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kNorm>)
    RotaryKernel(RotaryRows rows, HeadNorms norms, KvSlots slots,
                 HeadGeometry geometry) {
  WaitForEarlierLaunches();
  const int64_t token = blockIdx.x;
  const int64_t slot = slots.slots_T == nullptr ? -1 : slots.slots_T[token];
  const int num_k = static_cast<int>(rows.k.num_heads);
  const int first_v = static_cast<int>(rows.q.num_heads) + num_k;
  const int heads = slot < 0 ? first_v : first_v + num_k;
  // Whole warps stay in the loop, because PrepareHead sums over lanes.
  for (int i = static_cast<int>(threadIdx.x);
       i - Lane() < heads * geometry.lanes; i += static_cast<int>(blockDim.x)) {
    const int head = i / geometry.lanes;
    T* x = nullptr;
    if (head < first_v) {
      x = HeadOf<T>(rows.q, rows.k, token, head);
    } else if (head < heads) {
      x = HeadOf<T>(slots.v, token, head - first_v);
    }
    HeadWork<T, W> work = {.token = token, .from = x};
    if (head < first_v) {
      work.to = x;
      work.rotates = true;
      if constexpr (kNorm) work.weight_C = WeightOf<W>(norms, rows.q, head);
    }
    if (slot >= 0 && head >= rows.q.num_heads && head < heads) {
      const bool is_k = head < first_v;
      work.page = PageOf<T>(is_k ? slots.k_pages : slots.v_pages, slot, num_k,
                            head - first_v + (is_k ? num_k : 0), geometry.half);
    }
    PrepareHead<kNorm, kN>(rows, geometry, norms.eps, work);
  }
}

// Sums for the backward pass of a head's norm. `squares` is the sum of raw^2,
// and `dot` is the sum of dy * weight * raw.
struct NormSums {
  float squares;
  float dot;

  __device__ void Add(float dy, float weight, float raw) {
    squares += raw * raw;
    dot += dy * weight * raw;
  }
};

// The gradient of a head's norm. With inverse = 1 / rms(raw), d = dy * weight
// and n = raw * inverse, `Of` returns (d - n mean(d n)) * inverse. All lanes of
// the warp call the constructor.
struct NormSlope {
  __device__ NormSlope(const NormSums& sums, const HeadGeometry& geometry,
                       float eps) {
    const float squares = SumOverLanes(sums.squares, geometry.lanes);
    inverse = rsqrtf(squares * geometry.share + eps);
    mean = SumOverLanes(sums.dot, geometry.lanes) * inverse * geometry.share;
  }
  __device__ float Of(float dy, float weight, float raw) const {
    return (dy * weight - raw * inverse * mean) * inverse;
  }

  float inverse;
  float mean;
};

// A block computes one token: it writes the gradients of q and k, and copies
// the gradient of v.
template <typename T, typename W, int kN, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kNorm>)
    RotaryBackwardKernel(RotaryRows rows, HeadNorms norms,
                         HeadGradients gradients, HeadGeometry geometry) {
  WaitForEarlierLaunches();
  const int64_t token = blockIdx.x;
  const int half = geometry.half;
  const int first_v = static_cast<int>(rows.q.num_heads + rows.k.num_heads);
  const int heads = first_v + static_cast<int>(gradients.v.num_heads);
  const int begin = FirstPair<kN>(geometry);
  const int step = geometry.lanes * kN;
  for (int i = static_cast<int>(threadIdx.x);
       i - Lane() < heads * geometry.lanes; i += static_cast<int>(blockDim.x)) {
    const int head = i / geometry.lanes;
    const bool is_rotated = head < first_v;
    const T* dy = is_rotated ? HeadOf<T>(gradients.q, gradients.k, token, head)
                             : HeadOf<T>(gradients.v, token, head - first_v);
    T* dx = is_rotated ? HeadOf<T>(rows.q, rows.k, token, head)
                       : HeadOf<T>(gradients.v_to, token, head - first_v);
    // Returns the gradients of kN pairs, starting at pair c. Rotates the
    // gradients of q and k back.
    const auto gradient = [&](int c) {
      auto pairs = LoadPairs<kN>(dy + c, half);
      if (is_rotated) Rotate<true>(rows, token, c, &pairs);
      return pairs;
    };
    const int end = head < heads ? half : 0;
    if constexpr (!kNorm) {
      for (int c = begin; c < end; c += step) {
        StorePairs(gradient(c), dx + c, half);
      }
      continue;
    }
    const T* raw = HeadOf<T>(gradients.raw_q, gradients.raw_k, token, head);
    const W* weight = WeightOf<W>(norms, rows.q, head);
    NormSums sums = {0, 0};
    for (int c = begin; is_rotated && c < end; c += step) {
      const auto d = gradient(c);
      const auto w = LoadPairs<kN>(weight + c, half);
      const auto r = LoadPairs<kN>(raw + c, half);
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        sums.Add(d.first[k], w.first[k], r.first[k]);
        sums.Add(d.second[k], w.second[k], r.second[k]);
      }
    }
    const NormSlope slope(sums, geometry, norms.eps);
    for (int c = begin; c < end; c += step) {
      auto d = gradient(c);
      if (is_rotated) {
        const auto w = LoadPairs<kN>(weight + c, half);
        const auto r = LoadPairs<kN>(raw + c, half);
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          d.first.Set(k, slope.Of(d.first[k], w.first[k], r.first[k]));
          d.second.Set(k, slope.Of(d.second[k], w.second[k], r.second[k]));
        }
      }
      StorePairs(d, dx + c, half);
    }
  }
}

// Returns cudaErrorInvalidValue if q, k and v of a token have too many pairs.
cudaError_t CheckSize(const RotaryRows& rows) {
  const int64_t heads = rows.q.num_heads + 2 * rows.k.num_heads;
  return heads * rows.half_features < kMaxPairs ? cudaSuccess
                                                : cudaErrorInvalidValue;
}

bool IsEmpty(const RotaryRows& rows) {
  return rows.num_tokens == 0 || rows.half_features == 0 ||
         rows.q.num_heads + rows.k.num_heads == 0;
}

// Calls run(const T*, const W*, with_norms) with the types of a launch.
// with_norms is std::true_type or std::false_type.
template <typename Run>
cudaError_t WithNorms(DType dtype, const HeadNorms& norms, Run run) {
  if (norms.q_C == nullptr) {
    return WithType(dtype, [&]<typename T>(const T* t) {
      return run(t, t, std::false_type());
    });
  }
  return WithTypes(dtype, norms.dtype,
                   [&]<typename T, typename W>(const T* t, const W* w) {
                     return run(t, w, std::true_type());
                   });
}

// Starts one block for each token. A block has threads for `heads` heads, but
// at most kMaxThreads threads.
template <typename Kernel, typename... Arguments>
cudaError_t LaunchTokens(Kernel kernel, const RotaryRows& rows, int64_t heads,
                         int width, cudaStream_t stream,
                         const Arguments&... arguments) {
  const HeadGeometry geometry = {
      .lanes = LanesOf(rows.half_features / width),
      .half = static_cast<int>(rows.half_features),
      .share = 0.5F / static_cast<float>(rows.half_features)};
  return LaunchEarly(kernel, rows.num_tokens, 1,
                     PackThreads(heads * geometry.lanes, 1, kMaxThreads),
                     stream, rows, arguments..., geometry);
}

}  // namespace

cudaError_t Rotary(const RotaryRows& rows, const HeadNorms& norms,
                   const KvSlots& slots, cudaStream_t stream) {
  if (IsEmpty(rows)) return cudaSuccess;
  const cudaError_t status = CheckSize(rows);
  if (status != cudaSuccess) return status;
  return WithNorms(
      rows.dtype, norms,
      [&]<typename T, typename W>(const T*, const W*, auto with_norms) {
        const bool has_slots = slots.slots_T != nullptr;
        const bool is_wide = HeadsTakePacks<T>(rows, norms) &&
                             (!has_slots || (HeadsAreWide<T>(slots.v) &&
                                             IsWide<T>(slots.k_pages, 0) &&
                                             IsWide<T>(slots.v_pages, 0)));
        const int64_t heads =
            rows.q.num_heads + (has_slots ? 2 : 1) * rows.k.num_heads;
        return WithWidth<T>(is_wide, [&](auto width) {
          constexpr int kN = decltype(width)::value;
          return LaunchTokens(
              RotaryKernel<T, W, kN, decltype(with_norms)::value>, rows, heads,
              kN, stream, norms, slots);
        });
      });
}

cudaError_t RotaryBackward(const RotaryRows& rows, const HeadNorms& norms,
                           const HeadGradients& gradients,
                           cudaStream_t stream) {
  if (IsEmpty(rows)) return cudaSuccess;
  const cudaError_t status = CheckSize(rows);
  if (status != cudaSuccess) return status;
  return WithNorms(
      rows.dtype, norms,
      [&]<typename T, typename W>(const T*, const W*, auto with_norms) {
        constexpr bool kNorm = decltype(with_norms)::value;
        bool is_wide = HeadsTakePacks<T>(rows, norms);
        for (const HeadRows* read :
             {&gradients.q, &gradients.k, &gradients.v, &gradients.v_to,
              &gradients.raw_q, &gradients.raw_k}) {
          is_wide = is_wide && HeadsAreWide<T>(*read);
        }
        const int64_t heads =
            rows.q.num_heads + rows.k.num_heads + gradients.v.num_heads;
        return WithWidth<T>(is_wide, [&](auto width) {
          constexpr int kN = decltype(width)::value;
          return LaunchTokens(RotaryBackwardKernel<T, W, kN, kNorm>, rows,
                              heads, kN, stream, norms, gradients);
        });
      });
}

}  // namespace weft::kernels::cuda
