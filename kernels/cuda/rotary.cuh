// Functions that Rotary, RotaryBackward and RunLoraHeads share. They load,
// normalize and rotate a head's pairs, and store them in place and to pages.
#ifndef WEFT_KERNELS_CUDA_ROTARY_CUH_
#define WEFT_KERNELS_CUDA_ROTARY_CUH_

#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/rotary.h"

namespace weft::kernels::cuda {

// `lanes` adjacent threads compute one head of 2 * half features. A pair is the
// features (c, c + half). Lane l computes kN pairs starting at c = l * kN, then
// kN pairs starting at c = (l + lanes) * kN, and so on.
struct HeadGeometry {
  int lanes;
  int half;
  float share;  // 1 / (2 * half), which turns a sum into a mean.
};

template <typename T, int kN>
struct Pairs {
  Pack<T, kN> first;
  Pack<T, kN> second;
};

template <int kN, typename T>
__device__ Pairs<T, kN> LoadPairs(const T* at, int half) {
  return {LoadPack<kN>(at), LoadPack<kN>(at + half)};
}
template <typename T, int kN>
__device__ void StorePairs(const Pairs<T, kN>& pairs, T* at, int half) {
  StorePack(pairs.first, at);
  StorePack(pairs.second, at + half);
}

template <typename T>
__device__ T* HeadOf(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.token_stride +
         head * rows.head_stride;
}
// Returns a head by its number: heads of q come first, then those of k.
template <typename T>
__device__ T* HeadOf(const HeadRows& q, const HeadRows& k, int64_t token,
                     int64_t head) {
  return head < q.num_heads ? HeadOf<T>(q, token, head)
                            : HeadOf<T>(k, token, head - q.num_heads);
}
template <typename W>
__device__ const W* WeightOf(const HeadNorms& norms, const HeadRows& q,
                             int64_t head) {
  return static_cast<const W*>(head < q.num_heads ? norms.q_C : norms.k_C);
}

// Rotates kN pairs, starting at pair c, by the token's angles. If kBack,
// rotates by the negative angles.
template <bool kBack, typename T, int kN>
__device__ void Rotate(const RotaryRows& rows, int64_t token, int c,
                       Pairs<T, kN>* pairs) {
  const int64_t at = rows.positions_T[token] * rows.half_features + c;
  const auto cos = LoadPack<kN>(rows.cos_PC + at);
  const auto sin = LoadPack<kN>(rows.sin_PC + at);
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    const float a = pairs->first[k];
    const float b = pairs->second[k];
    const float s = kBack ? -sin[k] : sin[k];
    pairs->first.Set(k, a * cos[k] - b * s);
    pairs->second.Set(k, b * cos[k] + a * s);
  }
}

// Returns the sum over the `lanes` adjacent lanes of a head.
__device__ inline float SumOverLanes(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Returns the index of the lane's first pair.
template <int kN>
__device__ int FirstPair(const HeadGeometry& geometry) {
  return static_cast<int>(threadIdx.x) % geometry.lanes * kN;
}

// Returns 1 / sqrt(mean(x^2) + eps) of the head. All lanes of the warp call it;
// a lane without a head passes null.
template <typename T, int kN>
__device__ float InverseRmsOf(const T* x, const HeadGeometry& geometry,
                              float eps) {
  float squares = 0;
  for (int c = FirstPair<kN>(geometry); x != nullptr && c < geometry.half;
       c += geometry.lanes * kN) {
    const auto pairs = LoadPairs<kN>(x + c, geometry.half);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      squares +=
          pairs.first[k] * pairs.first[k] + pairs.second[k] * pairs.second[k];
    }
  }
  const float sum = SumOverLanes(squares, geometry.lanes);
  return rsqrtf(sum * geometry.share + eps);
}

// Returns the address in `pages` of a head of k or v, for the token in `slot`.
template <typename T>
__device__ T* PageOf(void* pages, int64_t slot, int64_t num_heads, int64_t head,
                     int half) {
  return static_cast<T*>(pages) + (slot * num_heads + head) * 2 * half;
}

// One head of one token: its input address and its output addresses.
template <typename T, typename W>
struct HeadWork {
  int64_t token = 0;
  const T* from = nullptr;  // Null: the lane has no head.
  T* to = nullptr;          // Null: the head is not stored in place.
  T* page = nullptr;        // Null: the head is not stored in a page.
  bool rotates = false;     // False for a head of v, which is only copied.
  const W* weight_C = nullptr;
};

// Stores a head. If head.rotates, first normalizes the head (if kNorm) and
// rotates it. All lanes of the warp call this function.
template <bool kNorm, int kN, typename T, typename W>
__device__ void PrepareHead(const RotaryRows& rows,
                            const HeadGeometry& geometry, float eps,
                            const HeadWork<T, W>& head) {
  const int half = geometry.half;
  float inverse = 1;
  if constexpr (kNorm) inverse = InverseRmsOf<T, kN>(head.from, geometry, eps);
  if (head.from == nullptr) return;
  for (int c = FirstPair<kN>(geometry); c < half; c += geometry.lanes * kN) {
    auto pairs = LoadPairs<kN>(head.from + c, half);
    if (head.rotates) {
      if constexpr (kNorm) {
        const auto weight = LoadPairs<kN>(head.weight_C + c, half);
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          pairs.first.Set(k, pairs.first[k] * inverse * weight.first[k]);
          pairs.second.Set(k, pairs.second[k] * inverse * weight.second[k]);
        }
      }
      Rotate<false>(rows, head.token, c, &pairs);
    }
    if (head.to != nullptr) StorePairs(pairs, head.to + c, half);
    if (head.page != nullptr) StorePairs(pairs, head.page + c, half);
  }
}

template <typename T>
bool HeadsAreWide(const HeadRows& rows) {
  return rows.num_heads == 0 || (IsWide<T>(rows.data, rows.token_stride) &&
                                 IsWide<T>(rows.data, rows.head_stride));
}

template <typename T>
bool HeadsTakePacks(const RotaryRows& rows, const HeadNorms& norms) {
  return rows.half_features % kWidth<T> == 0 && HeadsAreWide<T>(rows.q) &&
         HeadsAreWide<T>(rows.k) && IsWide<T>(rows.cos_PC, 0) &&
         IsWide<T>(rows.sin_PC, 0) && IsWide<T>(norms.q_C, 0) &&
         IsWide<T>(norms.k_C, 0);
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ROTARY_CUH_
